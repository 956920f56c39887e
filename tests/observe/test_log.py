"""log.txt: everything said and every warning, once each, with the time; never the end of a run."""

import logging
import re
import sys

import pytest

from moejax.errors import UserError
from moejax.observe.log import FILE_NAME, library, open_log, said
from moejax.observe.progress import Progress

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4}"


def lines(run_dir):
    return (run_dir / FILE_NAME).read_text(encoding="utf-8").splitlines()


def test_what_is_said_and_warned_is_logged_once_each_with_the_time(tmp_path, capsys):
    root = logging.StreamHandler(sys.stdout)  # as imports of JAX and Orbax leave one
    logging.getLogger().addHandler(root)
    try:
        with open_log(tmp_path), Progress(20, 0, sys.stdout, log_every=10) as progress:
            progress.say("Mesh dp=2 läuft.")
            logging.getLogger("moejax.data.loader").warning("Line %d is odd.", 3)
            for step in range(1, 21):
                progress.update(step, loss=1.0 / step)
    finally:
        logging.getLogger().removeHandler(root)
    shown, logged = capsys.readouterr().out.splitlines(), lines(tmp_path)
    assert all(re.match(STAMP + " (INFO|WARNING) ", line) for line in logged)
    assert [re.sub(f"^{STAMP} (INFO )?", "", line).replace("WARNING", "Warning:") for line in logged] == shown
    assert [line.split()[:2] for line in shown[2:]] == [["step", "1/20"], ["step", "10/20"], ["step", "20/20"]]


def test_opening_again_does_not_write_twice_and_goes_on_where_a_kill_left_off(tmp_path):
    (tmp_path / FILE_NAME).write_text("a line\nhalf a li")
    open_log(tmp_path)
    with open_log(tmp_path):
        said.info("first")
    said.info("after the end")
    library.info("no warning")
    a, half, first = lines(tmp_path)
    assert (a, half) == ("a line", "half a li") and first.endswith(" INFO first")


def test_a_log_that_cannot_be_written_is_given_up_with_a_sentence_and_the_run_goes_on(tmp_path, capsys):
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    with open_log(tmp_path):
        said.info("one")
        said.info("two")
    assert re.fullmatch(r".*log\.txt cannot be written any more .*goes on without it\.\n", capsys.readouterr().err)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        open_log(tmp_path / "file" / "run")
