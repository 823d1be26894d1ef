"""Texts of ranks as numbers that are summed with a gate."""

from __future__ import annotations

import pytest

from rackrun.frameworks.rank_texts import NoRoomError, numbers_of_text, room_for_text, texts_of_numbers

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("texts", [["a", ""], ["größer", '{"losses": [0.1, 2e-9]}'], ["x" * 500, "y"]])
def test_each_rank_reads_what_the_others_have_written(texts: list[str]) -> None:
    room = room_for_text(max(len(text.encode()) for text in texts))
    rows = [numbers_of_text(text, room) for text in texts]
    assert {len(row) for row in rows} == {room}
    assert texts_of_numbers(rows, texts[0]) == texts


def test_one_text_stands_for_all_where_they_are_alike() -> None:
    room = room_for_text(0)
    assert texts_of_numbers([numbers_of_text("same", room)] * 3, "same") == ["same"]


def test_a_text_for_which_there_is_no_room_is_noticed_and_there_is_room_for_it_next_time() -> None:
    texts = ["", "x" * 900]
    room = room_for_text(0)
    with pytest.raises(NoRoomError) as found:
        texts_of_numbers([numbers_of_text(text, room) for text in texts], "")
    room = room_for_text(found.value.longest)
    assert texts_of_numbers([numbers_of_text(text, room) for text in texts], "") == texts


def test_long_texts_that_are_alike_need_no_room() -> None:
    long = "x" * 9000
    room = room_for_text(0)
    assert texts_of_numbers([numbers_of_text(long, room)] * 2, long) == [long]
