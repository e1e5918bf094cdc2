"""A folder of predictions. A later run, or another process, can resume it without mixing up models
or videos.

    settings.json           what the predictions depend on: model, data, thresholds, ...
    predictions/ID.jsonl    the narrations of a finished video, as stream.py writes them
    videos/ID.json          the fingerprint of that video. It is written last: it marks the video as
                            finished
"""
import json
from hashlib import sha256
from itertools import chain
from pathlib import Path

import torch

from support.common.disk import (
    file_name, hash_tensors, read_json, read_jsonl, write_json, write_text,
)
from support.common.errors import BadData


class Predictions:
    """Predictions by the name of their video.

    `fingerprint` in the methods is a string that tells videos of the same name apart.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def keep_settings(self, settings: dict):
        """Write down the settings of these predictions.

        Raises BadData if the folder has predictions that were made with other settings.
        """
        file = self.folder / "settings.json"
        kept = settings
        if file.exists():
            kept = read_json(file)
        different = []
        for name in settings | kept:
            if kept.get(name, ...) != settings.get(name, ...):
                different.append(name)
        if different:
            raise BadData(f"{self.folder} holds predictions made with other settings "
                          f"({', '.join(different)}): choose another --output, or delete it")
        write_json(file, settings)

    def finished(self, name: str, fingerprint: str) -> bool:
        """Whether the video is finished.

        Raises BadData if the folder has another video with this name.
        """
        mark = self.mark_of(name)
        if not mark.exists():
            return False
        if read_json(mark) != {"fingerprint": fingerprint}:
            raise BadData(f"{self.folder} holds predictions of another video {name}, "
                          f"or of one that has changed since: "
                          f"choose another --output, or delete it")
        return self.file_of(name).exists()

    def save_rows(self, name: str, rows: list[dict], fingerprint: str):
        lines = [json.dumps(row) + "\n" for row in rows]
        write_text(self.file_of(name), "".join(lines))
        write_json(self.mark_of(name), {"fingerprint": fingerprint})

    def load_rows(self, name: str) -> list[dict]:
        return read_jsonl(self.file_of(name))

    def file_of(self, name: str) -> Path:
        return self.folder / "predictions" / f"{file_name(name)}.jsonl"

    def mark_of(self, name: str) -> Path:
        return self.folder / "videos" / f"{file_name(name)}.json"


def digest(module: torch.nn.Module) -> str:
    """SHA-256 of all that a model computes with: its numbers, with names, dtypes and shapes, and
    the settings of the models of transformers in it. (Before `speed_up`, which packs weights.)
    """
    hashed = sha256()
    hash_tensors(hashed, chain(module.named_parameters(), module.named_buffers()))
    for part in module.modules():
        config = getattr(part, "config", None)
        if hasattr(config, "to_diff_dict"):
            settings = config.to_diff_dict()
            settings.pop("transformers_version", None)      # of the program, not of the model
            hashed.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return hashed.hexdigest()
