"""Names and errors in sentences."""

from kvprobe.names import one_line


def test_an_error_of_several_lines_becomes_part_of_a_sentence():
    assert one_line(ValueError("a mapping is needed,\n   in line 2.\n")) == "a mapping is needed, in line 2"
    assert one_line(ValueError("x" * 1000)) == "x" * 200
    assert one_line(ValueError()) == ""
