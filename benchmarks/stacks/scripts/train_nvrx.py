"""NVRx ft_launcher 0.4.1: the script for torchrun, with a heartbeat to the rank's monitor in each step."""

import sys

import nvidia_resiliency_ext.fault_tolerance as fault_tolerance
import train_torchrun
import workload

client = fault_tolerance.RankMonitorClient()
forward = workload.Network.forward


def forward_with_heartbeat(self, x):
    client.send_heartbeat()
    return forward(self, x)


if __name__ == "__main__":
    client.init_workload_monitoring()
    workload.Network.forward = forward_with_heartbeat
    train_torchrun.main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
    client.shutdown_workload_monitoring()
