"""The plan command draws what was asked for, and refuses in one sentence what it cannot draw."""

import pytest

from moejax.errors import UserError
from moejax.parallel.schedule_csv import to_csv
from moejax.parallel.schedule_makers import make_schedule
from moejax.plan import main


def test_several_schedules_come_as_text_and_in_one_picture(tmp_path, capsys):
    to_csv(make_schedule("1f1b", 2, 3), tmp_path / "mine.csv")
    picture = tmp_path / "all.svg"
    wanted = f"gpipe,interleaved_1f1b:3,{tmp_path / 'mine.csv'}"
    code = main(
        [
            "--mesh",
            "pp=2",
            "--schedule",
            wanted,
            "--svg",
            str(picture),
            "--costs",
            "F=1,B=2",
            "parallel.pipeline.microbatches=4",
        ]
    )
    said, drawn = capsys.readouterr().out, picture.read_text()
    assert code == 0
    for caption in (
        "gpipe: 2 stages, 4 microbatches",
        "interleaved_1f1b: 2 stages, 4 microbatches, 3 chunks",
        "1f1b: 2 stages",
    ):
        assert caption in said and caption in drawn
    assert said.count("bubble") == 3 and said.count("peak stash") == 3


def test_without_names_the_schedule_is_the_config_s(tmp_path, capsys):
    main(["--mesh", "pp=4", "--svg", str(tmp_path / "p.svg"), "parallel.pipeline.schedule=zero_bubble_v"])
    assert "zero_bubble_v: 4 stages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule", "2f2b"], "no pipeline schedule named '2f2b'"),
        (["--schedule", "gpipe:two"], "whole number"),
        (["--schedule", "absent.csv"], "absent.csv"),
        (["--costs", "F=one"], "F=1,B=2"),
        (["--costs", "F=1"], "BACKWARD"),
        (["--svg", "/no/such/folder/p.svg"], "cannot be written"),
    ],
)
def test_bad_wishes_are_refused(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("model: {n_layers: 4}\n")
    with pytest.raises(UserError, match=words):
        main(["--config", "c.yaml", "--mesh", "pp=2", *arguments])
