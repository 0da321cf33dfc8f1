"""A report never damages what it is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from ups.run.scoring import report_folder


def test_a_report_goes_into_a_run_but_next_to_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, bundle = tmp_path / "run", tmp_path / "run" / "bundle"
    bundle.mkdir(parents=True)
    (bundle / "bundle.json").write_text("{}")
    assert report_folder(run) == run / "report"
    assert report_folder(bundle) == run / "bundle-report"
    monkeypatch.chdir(bundle)
    assert report_folder(Path(".")).resolve() == run / "bundle-report"
