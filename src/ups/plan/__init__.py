"""What a run will need before it starts: memory, time, communication, failures. Nothing here trains or starts ranks."""
