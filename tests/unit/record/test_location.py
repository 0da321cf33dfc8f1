"""Places in stacks that a rank printed while it stood still."""

from __future__ import annotations

from ups.record.failure import frames_of_dump, location_of_dump

WAITS = """Thread 0x00007f0000000001 (most recent call first):
  File "/x/lib/python3.11/selectors.py", line 415 in select

Thread 0x00007f0000000002 (most recent call first):
  File "/work/src/ups/record/manifest.py", line 9 in _hash_file
  File "/work/src/ups/training/checkpoint.py", line 240 in _commit
  File "/work/src/ups/training/checkpoint.py", line 71 in _run
  File "/x/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f0000000003 (most recent call first):
  File "/x/lib/python3.11/threading.py", line 331 in wait
  File "/work/src/ups/training/checkpoint.py", line 52 in wait
  File "/work/src/ups/training/checkpoint.py", line 108 in wait
"""
TRAINS = """Thread 0x00007f0000000002 (most recent call first):
  File "/work/src/ups/training/checkpoint.py", line 68 in _run

Current thread 0x00007f0000000003 (most recent call first):
  File "/work/src/ups/training/engine.py", line 20 in run
"""


def test_a_loop_that_waits_for_its_save_stands_where_the_save_stands() -> None:
    frame = location_of_dump(TRAINS + "\n" + WAITS)
    assert frame is not None
    assert (frame.path, frame.line) == ("/work/src/ups/record/manifest.py", 9)
    assert len(frames_of_dump(WAITS)) == 4


def test_a_loop_that_trains_stands_where_it_trains() -> None:
    frame = location_of_dump(WAITS + "\n" + TRAINS)
    assert frame is not None
    assert (frame.path, frame.line) == ("/work/src/ups/training/engine.py", 20)
