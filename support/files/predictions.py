"""A folder of what an evaluation has made of each video. A later run, or another process, can resume
it without mixing up models or videos.

    settings.json           what it depends on: model, data, thresholds, ...
    predictions/ID.jsonl    what was made of a finished video; narrations as stream.py writes them
    videos/ID.json          the fingerprint of that video. It is written last: it marks the video as
                            finished
"""
import json
from collections.abc import Callable
from pathlib import Path

from support.common.disk import file_name, read_json, read_jsonl, write_json, write_text
from support.common.errors import BadData
from support.common.locks import locked
from support.common.marks import refuse_if_changed

PARTS = ("settings.json", "predictions", "videos")      # of the folder, see above


class Predictions:
    """Rows (for JSON) by the name of their video.

    settings    what they depend on, but for the video
    renew       make rows again whose video has changed, instead of refusing it

    BadData if the folder has rows that were made with other settings.
    """

    def __init__(self, folder: str | Path, settings: dict, renew: bool = False):
        self.folder = Path(folder)
        self.renew = renew
        file = self.folder / "settings.json"
        if file.exists():
            refuse_if_changed(f"what {self.folder} holds", read_json(file), settings,
                              "choose another --output, or delete it")
        else:
            write_json(file, settings)

    def keep(self, name: str, fingerprint: str, make: Callable[[], list[dict]]) -> list[dict]:
        """The rows of a video: those that are there, or new ones.

        fingerprint     tells videos of one name apart. BadData if the folder has another one (but
                        for `renew`)
        """
        mark = self.folder / "videos" / f"{file_name(name)}.json"
        file = self.folder / "predictions" / f"{file_name(name)}.jsonl"
        if mark.exists():
            is_same = read_json(mark) == {"fingerprint": fingerprint}
            if not is_same and not self.renew:
                raise BadData(f"{self.folder} holds predictions of another video {name}, "
                              f"or of one that has changed since: "
                              f"choose another --output, or delete it")
            if is_same and file.exists():
                return read_jsonl(file)
        with locked(self.folder / "predictions", file.stem):       # against a second run
            rows = make()
            mark.unlink(missing_ok=True)
            write_text(file, "".join(json.dumps(row) + "\n" for row in rows))
            write_json(mark, {"fingerprint": fingerprint})
        return rows
