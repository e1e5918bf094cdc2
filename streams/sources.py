"""What an input of the command line is: a file, a recording from elsewhere, or a live source (not
in the paper).

    kitchen.mp4                                     a file
    http://... https://... -                        a recording, or live with --live; - is standard
                                                    input
    camera camera:1 camera:NAME /dev/video0         a camera of this machine
    rtsp://... rtmp://... udp://... tcp://...       live, like every other address with ://
    lavfi:testsrc=rate=25,realtime                  live: FFmpeg's test pictures

Of a recording, no picture is left out. Of a live source, the newest pictures count.
"""
from __future__ import annotations

import ctypes
import re
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import av

from support.common.errors import BadData
from support.common.text import without_secrets


CAMERA = re.compile(r"camera(?::(.+))?")
LIVE = re.compile(
    r"(?is)camera(:.+)?|/dev/video.*|lavfi:.+|(?!(https?|file):)[a-z][a-z0-9+.-]+://.*"
)
PIPE_OR_URL = re.compile(r"(?is)-|https?://.*")
# FFmpeg's name for cameras, by operating system; v4l2 on all others
CAMERA_FORMATS = {"darwin": "avfoundation", "win32": "dshow"}

# Options of FFmpeg. For all live sources: do not hold pictures back
LIVE_OPTIONS = {
    "fflags": "nobuffer+discardcorrupt",
    "flags": "low_delay",
    "analyzeduration": "1000000",
    "probesize": "1000000",
}
# For a format or a protocol
OPTIONS = {
    "rtsp": {"rtsp_transport": "tcp", "max_delay": "500000"},
    "udp": {"overrun_nonfatal": "1", "fifo_size": "50000"},
    "avfoundation": {"framerate": "30"},
    "http": {"reconnect": "1"},
}


def is_pipe_or_url(source: str) -> bool:
    """Whether an input comes through a pipe or the network. It is a recording without --live."""
    return PIPE_OR_URL.fullmatch(source) is not None


def is_live(source: str, live: bool = False) -> bool:
    """Whether an input is live, by its name or by --live (`live`).

    Raises BadData if --live is given for a file.
    """
    if LIVE.fullmatch(source):
        return True
    if live and not is_pipe_or_url(source) and not Path(source).is_fifo():
        raise BadData(f"{without_secrets(source)}: --live is for what comes as it happens; "
                      f"a file is narrated in full without it")
    return live


def all_live(sources: list[str], live: bool = False) -> bool:
    """Whether all inputs are live; False if all are recordings.

    Raises BadData if there are both, because live sources have bounds and recordings have none.
    """
    live_sources = []
    recordings = []
    for source in sources:
        if is_live(source, live):
            live_sources.append(source)
        else:
            recordings.append(source)
    if live_sources and recordings:
        raise BadData(f"{without_secrets(live_sources[0])} is live and "
                      f"{without_secrets(recordings[0])} is a recording; "
                      f"narrate them in two commands")
    return len(live_sources) > 0


# ---------------------------------------------------------------------- names

def without_secrets_numbered(source: str, sources: list[str]) -> str:
    """`without_secrets`, and the source's place among `sources` where another looks the same."""
    name = without_secrets(source)
    alike = {other for other in sources if without_secrets(other) == name}
    if len(alike) > 1:
        return f"{name} (input {sources.index(source) + 1})"
    return name


def source_name(source: str) -> str:
    """The name of an input's outputs where there are several inputs.

    It is camera-1, 10.0.0.7, or the name of a file.
    """
    if source == "-":
        return "stdin"
    if LIVE.fullmatch(source) or "://" in source:
        plain = without_secrets(source)
        # the scheme and the user say nothing about the place
        place = re.sub(r"^(/dev/|[^/]*://(?:[^/?#]*@)?)", "", plain)
        return re.sub(r"[^\w.]+", "-", place).strip("-.") or "input"
    # features: FILE.safetensors:NAME is called NAME
    return Path(re.sub(r"\.safetensors:(.)", r"/\1", source)).stem


def source_names(sources: list[str]) -> list[str]:
    """The names of the outputs of several inputs.

    Addresses that differ only in their secrets are numbered in their order: door-1, door-2. Raises
    BadData if two inputs have the same name otherwise.
    """
    names = [source_name(source) for source in sources]
    addresses: dict[str, list[str]] = {}            # by name
    for source, name in zip(sources, names):
        if "://" in source:
            addresses.setdefault(name, []).append(source)
    for i, source in enumerate(sources):
        alike = addresses.get(names[i], [])
        all_differ = len(set(alike)) == len(alike)
        if source in alike and len(alike) > 1 and all_differ:
            names[i] = f"{names[i]}-{alike.index(source) + 1}"
    repeated = sorted(name for name in names if names.count(name) > 1)
    if repeated:
        raise BadData(f"several inputs are called {repeated[0]}; rename one of them, or narrate "
                      f"it in another command, so that their outputs differ")
    return names


# ---------------------------------------------------------------------- FFmpeg

def camera_device(which: str) -> tuple[str, str]:
    """FFmpeg's file and format for a camera of this machine, given by number or name.

    Raises BadData if there is no such camera.
    """
    form = CAMERA_FORMATS.get(sys.platform, "v4l2")
    if form == "avfoundation":                      # it takes numbers and names
        return which, form
    if form == "v4l2" and which.isdecimal():
        return f"/dev/video{which}", form
    devices = av.enumerate_input_devices(form)
    names = [device.description or device.name for device in devices]
    for number, device in enumerate(devices):
        if which == str(number) or which.lower() in names[number].lower():
            file = f"video={device.name}" if form == "dshow" else device.name
            return file, form
    raise BadData(f"camera:{which}: there is no such camera; "
                  f"there are: {', '.join(names) or 'none'}")


def address(source: str, live: bool,
            given: dict[str, str]) -> tuple[str, str | None, dict[str, str]]:
    """What FFmpeg opens for a source: file, format, options.

    The format is None where FFmpeg finds it in the file. Options that are `given` replace ours.
    """
    file = source
    form = None
    camera = CAMERA.fullmatch(source)
    if camera:
        file, form = camera_device(camera[1] or "0")
    elif source.startswith("/dev/video"):
        form = "v4l2"
    elif source.startswith("lavfi:"):
        file = source.removeprefix("lavfi:")
        form = "lavfi"
    elif source == "-":
        file = "pipe:0"

    protocol = form or source.partition(":")[0].lower()
    if protocol == "rtp":
        protocol = "udp"                            # which carries it
    protocol = protocol.removesuffix("s")           # rtsps, https
    options = {}
    if live:
        options |= LIVE_OPTIONS
    options |= OPTIONS.get(protocol, {})
    options |= given
    return file, form, options


def source_option(text: str) -> tuple[str, str]:
    """An argparse type: NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        # the message must not repeat the text, which may hold a password
        raise ArgumentTypeError("must be NAME=VALUE, such as rtsp_transport=udp")
    return name, value


def unknown_options(names: list[str]) -> list[str]:
    """The names that are no options of this FFmpeg's formats and protocols.

    FFmpeg ignores such options without a message. Where its libraries cannot be asked, the list is
    empty.
    """
    search_all = 3                  # AV_OPT_SEARCH_CHILDREN | AV_OPT_SEARCH_FAKE_OBJ
    try:
        ffmpeg = ctypes.CDLL(av.container.core.__file__)
        find = ffmpeg.av_opt_find
        all_formats = ffmpeg.avformat_get_class
    except (AttributeError, OSError):
        return []                   # as on Windows, where a library shows only its own functions
    all_formats.restype = ctypes.c_void_p
    find.restype = ctypes.c_void_p
    find.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    formats = ctypes.c_void_p(all_formats())
    unknown = []
    for name in names:
        if not find(ctypes.byref(formats), name.encode(), None, 0, search_all):
            unknown.append(name)
    return unknown
