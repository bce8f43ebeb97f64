# SPDX-License-Identifier: Apache-2.0
"""`relax bundle`: the evidence of a run without secrets, weights and transcripts, also of a damaged run."""

from __future__ import annotations

import errno
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit
from typer.testing import CliRunner

from relax_core import bundle
from relax_core.api.errors import ConfigError, DiskFull
from relax_core.cli.main import app
from tests.unit.views.conftest import CONFIG

WriteRun = Callable[..., Path]


def packed(file: Path) -> dict[str, str]:
    """Return the texts of an archive by name within the run."""
    with tarfile.open(file) as archive:
        members = {member.name.partition("/")[2]: archive.extractfile(member) for member in archive}
        return {name: member.read().decode("utf-8", "replace") for name, member in members.items() if member}


@pytest.fixture
def run(write_run: WriteRun, tmp_path: Path) -> Path:
    path = write_run(tmp_path / "runs", steps=2)
    (path / "logs" / "actor.log").write_text("started\n")
    weights = path / "checkpoints" / "step-000002" / "trainer"
    weights.mkdir(parents=True)
    (weights / "shard.safetensors").write_bytes(b"weights")
    (weights.parent / "state.json").write_text("{}")
    (path / "failing-sample.json").write_text('{"prompt": "private"}')
    return path


def test_a_bundle_has_the_evidence_and_neither_weights_nor_transcripts(run: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["bundle", str(run), "--out", str(tmp_path / "one.tar.gz"), "--json"])
    assert said.exit_code == 0, said.output
    found = packed(tmp_path / "one.tar.gz")
    assert {"config.toml", "events.jsonl", "metrics.jsonl", "provenance.json", "summary.json", "logs/actor.log",
            "checkpoints/step-000002/state.json"} < found.keys()  # fmt: skip
    assert not [name for name in found if "shard" in name or "sample" in name]
    about, document = json.loads(found.pop("bundle.json")), json.loads(said.stdout)
    assert about["state"] == "finished" and sorted(about["files"]) == sorted(found) == sorted(document["files"])
    assert found["metrics.jsonl"] == (run / "metrics.jsonl").read_text()

    whole = packed(bundle(run, tmp_path / "two.tar.gz", samples=True))
    assert {"failing-sample.json", "samples/step-000001.jsonl.zst", "samples/step-000002.jsonl.zst"} < whole.keys()


def test_no_secret_is_packed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_URL", "mail-of-the-team")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("SIGNING_SECRET", "of two\nlines")
    shapes = ("hf_" + "a" * 30, "xoxb-1234-5678-abcdefabcdef", "glpat-" + "a" * 20, "github_pat_" + "1A" * 20,
              "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl")  # fmt: skip
    pem = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nbase64/of+it\n-----END RSA PRIVATE KEY-----"
    headers = "Cookie: sid=of-cookie; more=of-more\nset-cookie: id=of-set; Path=/\n{'Cookie': 'q=of-dict'}\n"
    (tmp_path / "outside").write_text("of another folder")
    (run / "config.toml").write_text(f'# schema: relax.config/1\n{CONFIG}[notify]\nurls = ["env:CHAT_URL"]\n'
                                     '[run.env]\nMY_PASSWORD = "plain-in-file"\n')  # fmt: skip
    (run / "logs" / "reward.log").write_text(
        f"post to mail-of-the-team with 0123456789abcdef\nand {' '.join(shapes)}\n{pem}\n{headers}"
    )
    (run / "logs" / "actor.log").write_text("signed of two\nlines\n")
    with (run / "events.jsonl").open("a") as events:
        said = {"message": f"\u2028of two\nlines {pem}", "api_key": "in-an-event", "Set-Cookie": "of-key"}
        events.write(json.dumps(said, ensure_ascii=False) + "\n")
    (run / "logs" / "other.log").symlink_to(tmp_path / "outside")
    found = packed(bundle(run, tmp_path / "one.tar.gz"))
    text = "".join(found.values())
    for secret in ("mail-of-the-team", "0123456789abcdef", *shapes, "plain-in-file", "of another folder", "of two",
                   "in-an-event", "base64/of+it", "of-cookie", "of-more", "of-set", "of-dict", "of-key"):  # fmt: skip
        assert secret not in text
    assert (tmp_path / "one.tar.gz").stat().st_mode & 0o777 == 0o600
    assert found["logs/reward.log"].startswith("post to [redacted] with [redacted]\nand [redacted] [redacted] ")
    config = tomlkit.parse(found["config.toml"]).unwrap()
    assert config["notify"]["urls"] == ["env:CHAT_URL"] and config["model"] == {"path": "models/tiny"}


@pytest.mark.parametrize(
    ("name", "content", "kept"),
    [
        ("status.json", b'{"schema": "relax.status/1", "roles": [', '{"schema": "relax.status/1", "roles": ['),
        (
            "summary.json",
            b'{"schema": "relax.summary/99", "status": {}}',
            '{"schema":"relax.summary/99","status":{}}\n',
        ),
        ("metrics.jsonl", b'{"step": 1}\n{"step": 2, "rew', '{"step":1}\n{"step": 2, "rew'),
        ("config.toml", b"steps = = 3\n", "steps = = 3\n"),
        ("logs/actor.log", b"\xff\xfe\n", "\\xff\\xfe\n"),
    ],
)
def test_files_that_are_cut_off_or_of_another_schema_are_packed_as_they_are(
    run: Path, tmp_path: Path, name: str, content: bytes, kept: str
) -> None:
    (run / name).write_bytes(content)
    assert packed(bundle(run, tmp_path / "one.tar.gz"))[name] == kept


def test_what_a_bundle_lacks_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "events.jsonl").unlink()
    monkeypatch.setattr("relax_plugin_report.bundle.LARGEST", 8)
    (run / "logs" / "actor.log").write_text("first line\nlast\n")
    found = packed(bundle(run, tmp_path / "one.tar.gz"))
    problems = json.loads(found["bundle.json"])["problems"]
    assert "events.jsonl: missing" in problems
    assert "logs/actor.log: has 16 bytes, of which the last 5 are kept" in problems
    assert found["logs/actor.log"] == "last\n"


def test_an_archive_that_exists_or_does_not_fit_on_the_disk_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "one.tar.gz"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="--out: got .*, which exists; name a new file"):
        bundle(run, file)
    assert file.read_text() == "mine"

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskFull, match="two.tar.gz"):
        bundle(run, tmp_path / "two.tar.gz")
    assert sorted(path.name for path in tmp_path.glob("*tar.gz*")) == ["one.tar.gz"]
