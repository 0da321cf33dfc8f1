"""What is written down and must be true, and the small system layer under everything. Standard library only.

Records: `run_dir` (names and paths of a run), `manifest`, `checkpoints`, `identity`, `blackbox`, `failure`, `causes`,
`rank_wrapper`. System: `files`, `processes`, `text`, `log`.
"""
