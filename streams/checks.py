"""Checks of inputs and outputs, before anything is loaded."""
from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from streams.sources import is_pipe_or_url, is_live, unknown_options
from streams.speech import find_player, find_voice
from streams.subtitles import outputs
from support.common.disk import check_distinct, check_writable
from support.common.errors import BadData
from support.common.options import report_static
from support.common.text import without_secrets
from support.files.features import find_features, is_features
from support.files.video import Video


def check_input(source: str, live: bool = False) -> None:
    """BadData if a video or a file of features cannot be read. A video's first picture is decoded.

    Live sources, pipes and URLs are not opened, because their pictures may come only once.
    """
    if is_live(source, live) or is_pipe_or_url(source) or Path(source).is_fifo():
        return
    if is_features(source):
        find_features(source)
    else:
        Video(source)


def check_inputs(sources: list[str], live: bool = False) -> None:
    """BadData if no input can be read.

    If at least one of several inputs can be read, the others are reported when their turn comes.
    """
    first_problem = None
    for source in sources:
        try:
            check_input(source, live)
            return
        except BadData as error:
            if first_problem is None:
                first_problem = error
    raise first_problem


def check_outputs(source: str, files: dict[str, str | None]) -> None:
    """BadData if an output cannot be written, or is the input or another output.

    source      the input; "" of a live source
    files       {format: path, or None}
    """
    check_distinct(source, *[file for file in files.values() if file is not None])
    for form, file in files.items():
        # a state is replaced as a whole; the other files are written into
        check_writable(file, in_place=form != "state")


def check_stream(args: Namespace, live: bool) -> None:
    """Check the inputs and outputs of stream.py, given its options.

    Raises BadData for errors. Options without effect are reported on stderr.
    """
    if live and args.pace:
        raise BadData(f"--pace is for recordings; {without_secrets(args.input[0])} is live, "
                      f"and comes as it happens")
    check_inputs(args.input, args.live)
    for source, _, files in outputs(args):
        check_outputs("" if live else source, files)
    option_names = [name for name, _ in args.source_option]
    for name in unknown_options(option_names):
        print(f"--source-option {name}: FFmpeg knows no such option here, so it has no effect",
              file=sys.stderr)
    report_static(args)
    if args.retries is not None and not live:
        print("--retries: only live inputs are opened again, so it has no effect", file=sys.stderr)
    speaks = find_voice(args) is not None
    if speaks:
        find_player()
    if speaks and not live and not args.pace:
        print("--speak: a recording is narrated faster than it can be spoken, and sentences are "
              "left out; --pace 1 narrates it as it plays", file=sys.stderr)
