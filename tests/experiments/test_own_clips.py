"""experiments/own_clips.py: clips that are made from a seed."""
import numpy as np

from experiments.own_clips import COLOURS, FPS, LIT, draw_clip


def test_a_lamp_is_lit_where_a_sentence_ends_and_the_ball_does_what_it_says():
    seen = set()
    for seed in range(20):
        pictures, table = draw_clip(seed)
        assert table == draw_clip(seed)[1]
        is_lit = [bool((picture[0, -1] == 255).all()) for picture in pictures]
        head, *rows = table.splitlines()
        last = -1
        for row in rows:
            time, text = row.split(",")
            _, colour, _, act = text.rstrip(".").split()
            end = round(float(time) * FPS) - 1
            assert is_lit[last + 1:end + 1] == [False] * (end - last - LIT) + [True] * LIT
            ball = [np.argwhere((pictures[n] == COLOURS[colour]).all(-1)).mean(0) for n in (last + 1, end)]
            down, right = np.sign(np.round(ball[1] - ball[0]))
            assert (act == "rolls") == (right != 0) and {"climbs": -1, "sinks": 1}.get(act, 0) == down
            seen.add(act)
            last = end
        assert (head, last) == ("time,text", len(pictures) - 1)
    assert seen == {"appears", "climbs", "sinks", "rolls", "rests"}
