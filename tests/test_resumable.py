"""A folder that work goes on from: one writer, the same settings, whole lines, tensors in their order."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
import torch

from gradleak.core import environment
from gradleak.core.configuration import to_toml
from gradleak.core.files import load_state, replacing, save_state, whole_lines
from gradleak.core.folder import FolderInUse, ResumableFolder


class Notes(ResumableFolder):
    work = "essay"
    config = "essay.toml"
    free = ("place.",)
    meaning = {"fingerprint.paper": "the paper"}


def test_only_the_same_settings_go_on_and_a_name_is_told_before_a_hash(tmp_path: Path) -> None:
    folder, settings = Notes(tmp_path), {"fingerprint": {"paper": "a"}, "pages": 3, "place": {"room": "x"}}
    assert not folder.holds(settings)
    folder.write("essay.toml", to_toml(settings))
    assert folder.holds({**settings, "place": {"room": "y"}})
    with pytest.raises(FolderInUse, match=r"holds an essay .* pages \(3 there, 4 now\); the paper\. .*its essay.toml"):
        folder.holds({**settings, "fingerprint": {"paper": "b"}, "pages": 4})
    folder.write("essay.toml", "pages = ")
    with pytest.raises(FolderInUse, match="nothing can be resumed"):
        folder.holds(settings)


def test_there_is_one_writer_and_what_others_left_is_not_built_upon(tmp_path: Path) -> None:
    folder = Notes(tmp_path)
    folder.lock()
    folder.demand_empty()
    with pytest.raises(FolderInUse, match="Another process"):
        Notes(tmp_path).lock()
    folder.close()
    Notes(tmp_path).lock()
    folder.write("drafts/one.txt", "words")
    with pytest.raises(FolderInUse, match="holds drafts and no essay"):
        folder.demand_empty()


@pytest.mark.parametrize("torn", [b"", b'{"page": 9'])
def test_what_was_in_flight_is_dropped_before_more_is_added(torn: bytes, tmp_path: Path) -> None:
    folder, lines = Notes(tmp_path), tmp_path / "lines.jsonl"
    assert folder.trimmed("lines.jsonl", lambda row: True) == []
    assert not lines.exists()
    lines.write_bytes(torn)
    assert folder.trimmed("lines.jsonl", lambda row: True) == []
    folder.append("lines.jsonl", [{"page": 1}, {"page": 2}])
    lines.write_bytes(lines.read_bytes() + torn)
    assert folder.trimmed("lines.jsonl", lambda row: row["page"] < 2) == [{"page": 1}]
    assert whole_lines(lines) == [b'{"page": 1}']


def test_a_state_keeps_the_order_of_its_tensors_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_state(path, {"step": 3}, {"z": torch.ones(2), "a": torch.arange(3)[::2]})
    header, held = load_state(path, FolderInUse)
    assert (header["step"], list(held), held["a"].tolist()) == (3, ["z", "a"], [0, 2])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FolderInUse, match="cannot be read"):
        load_state(path, FolderInUse)


def test_a_private_file_is_private_from_the_first_byte_and_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    (tmp_path / "secret.part").write_text("left by a run that was killed")
    (tmp_path / "secret.part").chmod(0o644)
    with replacing(path, private=True) as partial:
        assert stat.S_IMODE(partial.stat().st_mode) == 0o600
        partial.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_environment_names_the_commit_that_tracks_the_package() -> None:
    file = Path(environment.__file__)

    def git(*words: str) -> str | None:
        answer = subprocess.run(["git", "-C", str(file.parent), *words], capture_output=True, text=True, check=False)
        return None if answer.returncode else answer.stdout.strip()

    tracked = git("ls-files", "--error-unmatch", str(file)) is not None
    assert (environment.git(file) or {}).get("commit") == (git("rev-parse", "HEAD") if tracked else None)
