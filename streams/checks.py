"""What is checked before anything is loaded."""
from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from streams.sources import is_pipe_or_url, is_live, unknown_options
from streams.subtitles import outputs
from support.common.addresses import without_secrets
from support.common.disk import check_distinct, check_writable
from support.common.errors import BadData
from support.files.features import find_features, is_features
from support.files.video import Video


def check_input(source: str, live: bool = False) -> None:
    """BadData if a file, a video or features, cannot be read; of a video, its first picture is decoded. What comes from
    elsewhere is not opened: it may come only once."""
    if is_live(source, live) or is_pipe_or_url(source) or Path(source).is_fifo():
        return
    if is_features(source):
        find_features(source)
    else:
        Video(source)


def check_inputs(sources: list[str], live: bool = False) -> None:
    """BadData if the only input cannot be read, or none of several: where others can be, one that cannot is named when
    its turn comes."""
    first_problem = None
    for source in sources:
        try:
            check_input(source, live)
            return
        except BadData as error:
            first_problem = first_problem or error
    raise first_problem


def check_outputs(source: str, files: dict[str, str | None]) -> None:
    """BadData if an output cannot be written, or is the input (`source`; "" of a live one) or another output."""
    check_distinct(source, *(file for file in files.values() if file is not None))
    for form, file in files.items():
        check_writable(file, in_place=form != "state")


def check_stream(args: Namespace, live: bool) -> None:
    """The inputs and outputs of stream.py, by its options. What is only doubtful is a line on stderr."""
    if live and args.pace:
        raise BadData(f"--pace is for recordings; {without_secrets(args.input[0])} is live, and comes as it happens")
    check_inputs(args.input, args.live)
    for source, _, files in outputs(args):
        check_outputs("" if live else source, files)
    for name in unknown_options([name for name, _ in args.source_option]):
        print(f"--source-option {name}: FFmpeg knows no such option here, so it has no effect", file=sys.stderr)
    if (args.speak or args.voice_command) and not live and not args.pace:
        print("--speak: a recording is narrated faster than it can be spoken, and sentences are left out; "
              "--pace 1 narrates it as it plays", file=sys.stderr)
