"""What the page has to know of a kitchen, to show beside the video what the memory says of each place
(beyond/streams/page.py): names, pictures, and what each place truly showed."""
import base64
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image                          # it comes with matplotlib

from support.common.disk import read_json
from support.files.sentences import time_of
from toy.files import filmed
from toy.paint import TYPES, sprite
from toy.world import (
    COLOUR, EVENTS, FPS, NEED_MEMORY, PLACES, RGB, TYPE, Kitchen, name_of_thing,
)


def words_of_memory(text: str) -> str:
    """The words of a sentence that only visual memory can give, such as "red cup"; "" if there are
    none."""
    for event in NEED_MEMORY:
        pattern = EVENTS[event].sentence.format(place=r"\w+", thing=r"(\w+ \w+)")
        found = re.fullmatch(pattern, text)
        if found:
            return found[1]
    return ""


def kitchen_of(video: Path | None) -> dict:
    """What the page has to know of the kitchen, for JSON.

    places      their names
    pictures    {thing: its picture, a data: address}
    shown       [seconds, place, what it shows from then on]; only of a video whose kitchen is known
    sentences   [seconds, the true sentence]; likewise
    """
    about = {"places": PLACES, "pictures": pictures_of_things()}
    kitchen = None if video is None else true_kitchen(video)
    if kitchen is not None:
        about["shown"] = [(frame / FPS, place, thing) for frame, place, thing in changes(kitchen)]
        about["sentences"] = [(time_of(one.frame, FPS), one.text) for one in kitchen.narrations]
    return about


def true_kitchen(video: Path) -> Kitchen | None:
    """The plain kitchen that a toy video shows, from the seed in the .json beside it; or None."""
    truth = video.with_suffix(".json")
    content = read_json(truth) if truth.is_file() else None
    if not isinstance(content, dict) or not isinstance(content.get("seed"), int):
        return None
    narrations = filmed(truth).narrations
    kitchen = Kitchen(content["seed"], len(narrations) - 1)
    is_same = [(one.frame, one.text) for one in kitchen.narrations] == narrations
    return kitchen if is_same else None        # another world has the same seeds


def changes(kitchen: Kitchen) -> Iterator[tuple[int, int, str]]:
    """(frame, place, the thing that can be seen there from this frame on, or "")."""
    visible = [""] * len(PLACES)
    for frame, cells in enumerate(kitchen.labels()):
        for place, cell in enumerate(cells.tolist()):
            thing = name_of_thing(cell[TYPE], cell[COLOUR])
            if thing != visible[place]:
                visible[place] = thing
                yield frame, place, thing


def pictures_of_things() -> dict[str, str]:
    """{thing: its picture as a data: address}, of all things."""
    pictures = {}
    for kind, name in enumerate(TYPES, start=1):
        for colour, colour_rgb in enumerate(RGB, start=1):
            painted = sprite(name, colour_rgb)                 # [32, 32, 4]
            alpha = painted[..., 3:]                           # 0 .. 1; a PNG has 0 .. 255,
            rgb = painted[..., :3] / alpha.clip(min=1e-3)      # and colours that alpha leaves alone
            pixels = np.concatenate([rgb, 255 * alpha], -1).round().astype(np.uint8)
            file = BytesIO()
            Image.fromarray(pixels).save(file, "png")
            data = base64.b64encode(file.getvalue()).decode()
            pictures[name_of_thing(kind, colour)] = f"data:image/png;base64,{data}"
    return pictures
