"""What an input of the command line is: a file, a recording from elsewhere, or a live source (not in the paper).

    kitchen.mp4                                     a file
    http://... https://... -                        a recording, or live with --live; - is standard input
    camera camera:1 camera:NAME /dev/video0         a camera of this machine
    rtsp://... rtmp://... udp://... tcp://...       live, and so is everything else with ://
    lavfi:testsrc=rate=25,realtime                  live: FFmpeg's test pictures

Of a recording nothing is left out; of a live source the newest pictures count.
"""
from __future__ import annotations

import ctypes
import re
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import av

from support.common.addresses import without_secrets
from support.common.errors import BadData


CAMERA = re.compile(r"camera(?::(.+))?")
LIVE = re.compile(r"(?is)camera(:.+)?|/dev/video.*|lavfi:.+|(?!(https?|file):)[a-z][a-z0-9+.-]+://.*")
ELSEWHERE = re.compile(r"(?is)-|https?://.*")
DEVICES = {"darwin": "avfoundation", "win32": "dshow"}         # FFmpeg's name for cameras; elsewhere v4l2
TIMELY = {"fflags": "nobuffer+discardcorrupt", "flags": "low_delay", "analyzeduration": "1000000",
          "probesize": "1000000"}                              # of all live sources: FFmpeg keeps nothing back
OPTIONS = {"rtsp": {"rtsp_transport": "tcp", "max_delay": "500000"}, "udp": {"overrun_nonfatal": "1",
           "fifo_size": "50000"}, "avfoundation": {"framerate": "30"}, "http": {"reconnect": "1"}}


def is_pipe_or_url(source: str) -> bool:
    """Is it a recording that comes through a pipe or the network (unless --live makes it live)?"""
    return ELSEWHERE.fullmatch(source) is not None


def is_live(source: str, live: bool = False) -> bool:
    """Is it a live source, by its name or by --live? BadData if --live is said of a file."""
    if LIVE.fullmatch(source):
        return True
    if live and not is_pipe_or_url(source) and not Path(source).is_fifo():
        raise BadData(f"{without_secrets(source)}: --live is for what comes as it happens; a file is narrated in full without it")
    return live


def all_live(sources: list[str], live: bool = False) -> bool:
    """Are these inputs live sources? BadData if some are and others are not: they are bounded in different ways."""
    found = [is_live(source, live) for source in sources]
    if len(set(found)) > 1:
        one, other = without_secrets(sources[found.index(True)]), without_secrets(sources[found.index(False)])
        raise BadData(f"{one} is live and {other} is a recording; narrate them in two commands")
    return found[0]


def without_secrets_numbered(source: str, sources: list[str]) -> str:
    """`without_secrets`, with the place among all sources where another one would look the same."""
    name = without_secrets(source)
    alike = {other for other in sources if without_secrets(other) == name}
    return f"{name} (input {sources.index(source) + 1})" if len(alike) > 1 else name


def source_name(source: str) -> str:
    """What the outputs of an input are called, among several: camera-1, 10.0.0.7-door, the name of a file."""
    if source == "-":
        return "stdin"
    if LIVE.fullmatch(source) or "://" in source:
        plain = re.sub(r"^(/dev/|[^/]*://(?:[^/?#]*@)?)", "", without_secrets(source).replace("***", ""))
        return re.sub(r"[^\w.]+", "-", plain).strip("-.") or "input"
    return Path(re.sub(r"\.safetensors:(.)", r"/\1", source)).stem


def source_names(sources: list[str]) -> list[str]:
    """The names of the outputs of several inputs. Addresses that differ only in what is masked are numbered in their
    order: door-1, door-2. BadData if two inputs have the same name all the same."""
    names = [source_name(source) for source in sources]
    by_name: dict[str, list[str]] = {}
    for source, name in zip(sources, names):
        if "://" in source:
            by_name.setdefault(name, []).append(source)
    for place, (source, name) in enumerate(zip(sources, names)):
        alike = by_name.get(name, [])
        if source in alike and len(set(alike)) == len(alike) > 1:
            names[place] = f"{name}-{alike.index(source) + 1}"
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadData(f"several inputs are called {twice[0]}; rename one of them, or narrate it in another command, "
                      f"so that their outputs differ")
    return names


def camera_device(which: str) -> tuple[str, str]:
    """FFmpeg's file and format of a camera of this machine by number or name; BadData if no camera has the name."""
    form = DEVICES.get(sys.platform, "v4l2")
    if form == "avfoundation" or form == "v4l2" and which.isdecimal():
        return which if form == "avfoundation" else f"/dev/video{which}", form
    cameras = [(device.name, device.description or device.name) for device in av.enumerate_input_devices(form)]
    for number, (file, name) in enumerate(cameras):
        if which == str(number) or which.lower() in name.lower():
            return f"video={file}" if form == "dshow" else file, form
    raise BadData(f"camera:{which}: there is no such camera; there are: {', '.join(n for _, n in cameras) or 'none'}")


def address(source: str, live: bool, given: dict[str, str]) -> tuple[str, str | None, dict[str, str]]:
    """What FFmpeg opens: file, format (None: it looks into the file) and options; `given` ones replace ours."""
    file, form = source, None
    if camera := CAMERA.fullmatch(source):
        file, form = camera_device(camera[1] or "0")
    elif source.startswith("/dev/video"):
        form = "v4l2"
    elif source.startswith("lavfi:"):
        file, form = source.removeprefix("lavfi:"), "lavfi"
    elif source == "-":
        file = "pipe:0"
    scheme = form or source.partition(":")[0].lower()
    protocol = "udp" if scheme == "rtp" else scheme.removesuffix("s")               # rtsps, https
    return file, form, (TIMELY if live else {}) | OPTIONS.get(protocol, {}) | given


def source_option(text: str) -> tuple[str, str]:
    """An argparse type: NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ArgumentTypeError("must be NAME=VALUE, such as rtsp_transport=udp")   # its text may hold a password
    return name, value


def unknown_options(names: list[str]) -> list[str]:
    """Those that are no options of this FFmpeg's formats and protocols: it ignores them without a word. Where its
    libraries cannot be asked, none."""
    search_all = 3                               # AV_OPT_SEARCH_CHILDREN | AV_OPT_SEARCH_FAKE_OBJ
    try:
        ffmpeg = ctypes.CDLL(av.container.core.__file__)
        find, formats = ffmpeg.av_opt_find, ffmpeg.avformat_get_class
    except (AttributeError, OSError):            # as on Windows, where a library shows only what is its own
        return []
    formats.restype = find.restype = ctypes.c_void_p
    find.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    known = ctypes.c_void_p(formats())
    return [name for name in names
            if not find(ctypes.byref(known), name.encode(), None, 0, search_all)]
