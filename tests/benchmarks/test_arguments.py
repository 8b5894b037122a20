"""Options that are wrong end a benchmark before it measures anything."""

from argparse import ArgumentTypeError

import pytest

from benchmarks import __main__ as program
from benchmarks.arguments import check_folder, count, counts, seconds
from benchmarks.optimisation import __main__ as optimisation


def test_what_numbers_are():
    assert (count("3"), counts("2,4"), seconds("0.5")) == (3, (2, 4), 0.5)
    for reader, texts in ((count, ("0", "-1", "1.5", "x", "")), (seconds, ("0", "-1", "nan", "inf", "x"))):
        for text in texts:
            with pytest.raises(ArgumentTypeError, match=f"{text!r} is no"):
                reader(text)
    with pytest.raises(ArgumentTypeError, match="'x' is no whole number"):
        counts("2,x")


@pytest.mark.parametrize(
    "arguments",
    [
        ("speed", "--workers", "x"),
        ("speed", "--workers", "2,"),
        ("cost", "--rounds", "0"),
        ("cost", "--threads", "-1"),
        ("gpu", "--seconds", "-1"),
        ("gpu", "--repeats", "0"),
    ],
)
def test_a_wrong_number_names_its_option(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(arguments)
    assert ended.value.code == 2
    assert f"argument {arguments[1]}: " in capsys.readouterr().err.splitlines()[-1]


def test_of_optimisation_too(capsys):
    with pytest.raises(SystemExit):
        optimisation.main(["--trials", "0"])
    assert "argument --trials: '0' is no whole number of at least 1" in capsys.readouterr().err


def test_results_that_could_not_be_written_are_not_measured(tmp_path, capsys):
    check_folder(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    there = tmp_path / "file" / "below"
    with pytest.raises(ValueError, match=f"--output: {there} cannot be written to: Not a directory"):
        check_folder(there)
    for arguments in (("speed",), ("gpu", "--device", "cpu", "--quick", "--no-tests"), ("cost", "--quick")):
        output = there / "x.json" if arguments[0] == "cost" else there
        assert program.main([*arguments, "--output", str(output)]) == 1
        said = capsys.readouterr()
        assert "cannot be written to" in said.err
        assert "measur" not in said.err + said.out
