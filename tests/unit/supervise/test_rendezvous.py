"""Where ranks meet: a private file that no other attempt has seen, or an address that is given as a whole."""

from pathlib import Path

from ups.supervise.options import Rendezvous


def test_each_attempt_gets_a_new_file_in_a_directory_of_its_own(tmp_path: Path) -> None:
    reported = [Rendezvous().variables(tmp_path) for _ in range(2)]
    paths = [Path(variables["UPS_RENDEZVOUS"].removeprefix("file://")) for variables in reported]
    assert paths[0] != paths[1]
    assert all(path.parent.stat().st_mode & 0o777 == 0o700 and not path.exists() for path in paths)
    assert reported[0]["GLOO_SOCKET_IFNAME"] == reported[0]["NCCL_SOCKET_IFNAME"] == "lo"


def test_an_address_comes_with_its_port_and_interface(tmp_path: Path) -> None:
    variables = Rendezvous("10.0.0.7", 29400, "eth1").variables(tmp_path)
    assert variables == {
        "UPS_RENDEZVOUS": "tcp://10.0.0.7:29400",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "eth1",
    }
    assert list(tmp_path.iterdir()) == []
