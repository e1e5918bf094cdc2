"""Narrations as a subtitle track and as speech: in an .mp4, or while a stream goes on (stream.py --speak).

    python -m streams.speech video.mp4 narrations.jsonl --mp4 out.mp4 [--speak] [--voice-command "piper -m x.onnx -f -"]

The video's packets are copied as they are, the sentences (stream.py --jsonl) become a track of subtitles that a viewer
can switch off. With --speak, a voice says each sentence when its segment ends, or after the sentence before; what the
video itself is heard to say becomes 12 dB quieter. The voice is espeak-ng (GPL-3, called as a program), on macOS also
`say`, or any command that reads text and writes a WAV. Other tracks of the video are left out.
"""
import argparse
import heapq
import io
import shlex
import shutil
import subprocess
import sys
import tempfile
import wave
from collections import Counter
from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from threading import Condition, Thread

import av
import numpy as np
from tqdm import tqdm

from streams.subtitles import read_narrations
from support.common.disk import check_distinct, one_line, replacing
from support.common.errors import BadData, command_line, first_line
from support.common.options import Parser
from support.common.progress import progress
from support.files.video import Video

RATE = 48000                                    # samples per second of all sound that is written
FASTER, TOO_LATE, TEMPO = 3.0, 6.0, 1.5         # seconds behind from which speech is faster, and left out; how much
QUIETER = 10 ** (-12 / 20)                      # 12 dB
COPIED = ("aac", "ac3", "mp3", "opus")         # sound that an .mp4 can hold as it is
LONGEST_WAIT = 60                               # seconds that a voice may take for a sentence
# text on stdin, WAV on stdout; `say` writes only files
VOICES = {"espeak-ng": ["espeak-ng", "--stdout"],
          "say": ["sh", "-c", 'f=$(mktemp) && say --file-format=WAVE --data-format=LEI16@22050 -o "$f" -f - && '
                              'cat "$f" && rm "$f"']}
PLAYERS = ("afplay", "aplay -q", "paplay", "pw-play", "ffplay -nodisp -autoexit -loglevel error")         # of a file
ASS = (b"[Script Info]\nScriptType: v4.00+\n\n[V4+ Styles]\nFormat: Name, Fontname, Fontsize\n"
       b"Style: Default,Arial,16\n\n[Events]\nFormat: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, "
       b"Effect, Text\n")                       # what the encoder of subtitles wants to know of their looks


# ---------------------------------------------------------------------- a voice

def speech_options(parser: argparse.ArgumentParser):
    parser.add_argument("--speak", action="store_true", help="speak the narrations (espeak-ng; on macOS also say)")
    parser.add_argument("--voice-command", metavar="COMMAND",
                        help="speak them with this command: text on stdin, WAV on stdout")


def find_voice(args: argparse.Namespace) -> list[str] | None:
    """The command that speaks, by the options above; None: nothing is to be spoken. BadData if there is none."""
    if args.voice_command is not None:
        try:
            words = shlex.split(args.voice_command)
        except ValueError as error:
            raise BadData(f"--voice-command {args.voice_command}: {first_line(error)}") from None
        if not words or not shutil.which(words[0]):
            raise BadData(f"--voice-command: there is no program {(words or ['of no name'])[0]}; give one that reads "
                          f"text and writes a WAV")
        return words
    if not args.speak:
        return None
    found = next((words for name, words in VOICES.items() if shutil.which(name)), None)
    if found is None:
        raise BadData('there is no voice: apt install espeak-ng (macOS: brew install espeak-ng), or give another one '
                      'with --voice-command "..."')
    return found


def speak(words: list[str], text: str, tempo: float = 1.0) -> np.ndarray:
    """float32 [n]: a sentence as sound, RATE samples a second, `tempo` times faster than the voice says it.

    BadData if the voice fails or writes no WAV.
    """
    name = f"the voice ({words[0]})"
    try:
        done = subprocess.run(words, input=f"{text}\n".encode(), capture_output=True, timeout=LONGEST_WAIT)
    except subprocess.TimeoutExpired:
        raise BadData(f"{name} took more than {LONGEST_WAIT} s for one sentence; choose another one") from None
    if done.returncode:
        said = one_line(done.stderr.decode(errors="replace"))[-200:]
        raise BadData(f"{name} fails with exit code {done.returncode}: {said}")
    filters = [] if tempo == 1 else [("atempo", str(tempo))]
    try:
        pieces = [frame.to_ndarray() for frame in listen(io.BytesIO(done.stdout), "mono", filters, "wav")]
    except av.FFmpegError:
        raise BadData(f"{name} wrote no WAV to stdout ({len(done.stdout)} bytes)") from None
    return np.concatenate([np.zeros((1, 0), np.float32), *pieces], 1)[0]


def listen(source, layout: str, filters: Iterable[tuple[str, str]] = (), form: str | None = None
           ) -> Iterator[av.AudioFrame]:
    """The sound of a file, float32 [channels, n], RATE samples a second; nothing if it has none."""
    with av.open(source, format=form) as container:
        stream, graph = container.streams.best("audio"), av.filter.Graph()
        if stream is None:
            return
        even = graph.add("aformat", f"sample_fmts=fltp:sample_rates={RATE}:channel_layouts={layout}")
        more = [graph.add(*one) for one in filters]
        graph.link_nodes(graph.add_abuffer(template=stream), even, *more, graph.add("abuffersink")).configure()
        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except av.FFmpegError:                                              # a damaged packet is not heard
                frames = []
            for frame in [*frames, None] if packet.dts is None else frames:     # the last packet is empty
                graph.push(frame)
                try:
                    while True:
                        yield graph.pull()
                except (av.BlockingIOError, av.EOFError):
                    pass


# ---------------------------------------------------------------------- sound, in time

def utterances(rows: list[dict], words: list[str], count: Counter) -> Iterator[tuple[int, np.ndarray]]:
    """(first sample, sound [n]) of each sentence, in order; `count` says how many were faster, or left out."""
    free = 0
    for row in sorted(rows, key=lambda row: row["end"]):
        begin = round(row["end"] * RATE)
        behind = (free - begin) / RATE
        if row.get("repeat"):                                                   # said already
            continue
        count["faster"] += FASTER < behind <= TOO_LATE
        count["left out"] += behind > TOO_LATE
        if behind <= TOO_LATE:
            sound = speak(words, row["text"], TEMPO if behind > FASTER else 1.0)
            begin = max(begin, free)
            free = begin + len(sound)
            yield begin, sound


def speech(spoken: Iterable[tuple[int, np.ndarray]]) -> Iterator[np.ndarray]:
    """Utterances as one sound: pieces [1, n], with silence between them."""
    at = 0
    for begin, sound in spoken:
        while at < begin:
            yield np.zeros((1, min(RATE, begin - at)), np.float32)
            at += min(RATE, begin - at)
        yield sound[None]
        at += len(sound)


def own_sound(path: str, start: float) -> Iterator[np.ndarray]:
    """The video's sound from its picture's `start` (s) on, in pieces [2, n]; gaps in it are silence."""
    at = 0
    for frame in listen(path, "stereo"):
        shift = 0 if frame.pts is None else round((float(frame.pts * frame.time_base) - start) * RATE) - at
        if not RATE // 10 < abs(shift) < 60 * RATE:                             # rounding, or a damaged clock
            shift = 0
        piece = np.concatenate([np.zeros((2, max(0, shift)), np.float32), frame.to_ndarray()[:, max(0, -shift):]], 1)
        yield piece
        at += piece.shape[1]


def blocks(pieces: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """The same sound [c, n] in blocks of `size` samples, the last one shorter."""
    waiting = None
    for piece in pieces:
        waiting = piece if waiting is None else np.concatenate([waiting, piece], 1)
        while waiting.shape[1] >= size:
            yield waiting[:, :size]
            waiting = waiting[:, size:]
    if waiting is not None and waiting.shape[1]:
        yield waiting


def mix(spoken: Iterable[np.ndarray], own: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Speech [1, n] over a quieter sound [c, n], in blocks [c, up to 1024]; the longer one goes on alone."""
    silence = np.zeros((1, 0), np.float32)
    for over, under in zip_longest(blocks(spoken, 1024), blocks(own, 1024), fillvalue=silence):
        n = max(over.shape[1], under.shape[1])
        over, under = (np.pad(sound, ((0, 0), (0, n - sound.shape[1]))) for sound in (over, under))
        yield np.clip(over + QUIETER * under, -1, 1)


# ---------------------------------------------------------------------- the file

def write_mp4(video: str | Path, rows: list[dict], path: str | Path, words: list[str] | None = None) -> Counter:
    """The video with subtitles and, if there is a voice, with speech; returns how many sentences were faster or
    left out. Memory does not grow with its length. BadData if .mp4 cannot hold the video's packets.
    """
    Video(video)                                                                # says what is wrong with it, if it is
    count = Counter()
    try:
        with replacing(path) as part, av.open(f"file:{video}") as source, \
                av.open(f"file:{part}", "w", format="mp4", options={"movflags": "+faststart"}) as target:
            streams = mp4_tracks(source, target, rows, words, count)
            target.start_encoding()
            with progress(None, "speech", len(rows), "sentence", leave=False, delay=0.5) as bar:
                for packet in heapq.merge(*streams, key=lambda packet: packet.dts * packet.time_base):
                    bar.update(packet.stream.type == "subtitle")
                    target.mux(packet)
    except BadData:
        raise
    except (av.FFmpegError, ValueError) as error:                               # PyAV says ValueError of some codecs
        raise BadData(f"{video}: its pictures cannot be copied into an .mp4 ({first_line(error)}); convert it first: "
                      f"ffmpeg -i {shlex.quote(str(video))} converted.mp4") from error
    return count


def mp4_tracks(source, target, rows: list[dict], words: list[str] | None, count: Counter) -> list[Iterator[av.Packet]]:
    """The packets of each track, as made for the open file `target`. Times count from the first picture's."""
    name, pictures, sound = source.name, source.streams.best("video"), source.streams.best("audio")
    start = (pictures.start_time or 0) * pictures.time_base
    whole = sound and not words and sound.codec_context.codec.canonical_name in COPIED
    found = [copied(name, stream.index, target.add_stream_from_template(stream), start)
             for stream in ([pictures, sound] if whole else [pictures])]
    if words or sound and not whole:
        own = own_sound(name, float(start)) if sound else []
        heard = mix(speech(utterances(rows, words, count)), own) if words else own
        found.append(as_packets(heard, target.add_stream("aac", rate=RATE, layout="stereo" if sound else "mono")))
    captions = target.add_stream("mov_text")
    captions.codec_context.subtitle_header, captions.time_base = ASS, Fraction(1, 1000)
    return [*found, captioned(rows, captions)]


def copied(name: str, index: int, stream, start: Fraction) -> Iterator[av.Packet]:
    """The packets of stream `index` of a file, for `stream`; their times count from `start` (s)."""
    waiting = []
    with av.open(name) as container:
        original = container.streams[index]
        for packet in container.demux(original):
            waiting += [packet] if packet.size else []                          # the last one is empty
            if packet.dts is None:                                              # Matroska does not store it, and the
                continue                                                        # first ones cannot be guessed there
            for i, one in enumerate(reversed(waiting)):
                one.dts = packet.dts - i * round(1 / original.average_rate / packet.time_base) if i else packet.dts
            for one in waiting:
                shift = round(start / one.time_base)
                one.dts, one.pts, one.stream = one.dts - shift, one.pts and one.pts - shift, stream
                yield one
            waiting = []
    if waiting:
        raise BadData(f"{name[5:]}: its packets have no times; convert it first")


def captioned(rows: list[dict], stream) -> Iterator[av.Packet]:
    """Each sentence while its segment lasts, or until the next one begins."""
    rows = sorted(rows, key=lambda row: row["start"])
    for row, later in zip_longest(rows, rows[1:]):
        end = row["end"] if later is None else min(row["end"], later["start"])
        text = one_line(row["text"]).encode()[:2 ** 16 - 1].decode(errors="ignore").encode()
        packet = av.Packet(len(text).to_bytes(2, "big") + text)                 # as is: the encoder would read marks
        packet.stream, packet.time_base = stream, Fraction(1, 1000)
        packet.pts = packet.dts = round(1000 * row["start"])
        packet.duration = round(1000 * end) - packet.pts
        yield packet


def as_packets(pieces: Iterable[np.ndarray], stream) -> Iterator[av.Packet]:
    at = 0
    for piece in pieces:
        frame = av.AudioFrame.from_ndarray(np.repeat(piece, stream.codec_context.channels // len(piece), 0),
                                           "fltp", stream.codec_context.layout.name)
        frame.sample_rate, frame.pts, frame.time_base = RATE, at, Fraction(1, RATE)
        at += piece.shape[1]
        yield from stream.encode(frame)
    yield from stream.encode()


# ---------------------------------------------------------------------- live

class Speaker:
    """Speaks sentences while a stream goes on, with one process at a time. A sentence that comes while one is spoken
    waits; of those that wait only the newest is spoken.

    A context manager: leaving it waits for what is left to say, or, after an error, for the sentence being spoken.
    Without an option of `speech_options` it says nothing. BadData if nothing here can speak or play sound.
    """

    def __init__(self, args: argparse.Namespace):
        self.voice, self.waiting, self.ended, self.change = find_voice(args), None, False, Condition()
        self.thread = Thread(target=self.work, daemon=True)
        if self.voice:
            self.player = next((one.split() for one in PLAYERS if shutil.which(one.split()[0])), None)
            if self.player is None:
                raise BadData(f"there is no program to play sound: apt install alsa-utils (looked for "
                              f"{', '.join(one.split()[0] for one in PLAYERS)})")
            self.thread.start()

    def say(self, text: str):
        with self.change:
            self.waiting = text
            self.change.notify()

    def work(self):
        """Until the end, or until a voice or a player fails: then one line says so, and the stream goes on."""
        while (text := self.next()) is not None:
            try:
                self.play(speak(self.voice, text))
            except (BadData, OSError) as error:
                tqdm.write(f"speech ends here: {error}", file=sys.stderr)
                return

    def next(self) -> str | None:
        with self.change:
            self.change.wait_for(lambda: self.waiting is not None or self.ended)
            text, self.waiting = self.waiting, None
            return text

    def play(self, sound: np.ndarray):
        with tempfile.TemporaryDirectory() as folder:
            with wave.open(f"{folder}/sentence.wav", "wb") as file:
                file.setparams((1, 2, RATE, len(sound), "NONE", None))
                file.writeframes((32767 * sound.clip(-1, 1)).astype("<i2").tobytes())
            done = subprocess.run([*self.player, f"{folder}/sentence.wav"], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if done.returncode:
            raise BadData(f"{self.player[0]} fails: {one_line(done.stderr.decode(errors='replace'))[-200:]}")

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        with self.change:
            self.ended, self.waiting = True, None if error else self.waiting
            self.change.notify()
        if self.voice:
            self.thread.join()


def main():
    parser = Parser(prog="python -m streams.speech",
                    description="Add narrations to a video, as subtitles and as speech.")
    parser.add_argument("video", help="video file")
    parser.add_argument("jsonl", type=Path, help="its narrations, as stream.py --jsonl writes them")
    parser.add_argument("--mp4", required=True, metavar="FILE", help="the video with a track of subtitles")
    speech_options(parser)
    args = parser.parse_args()

    def run():
        words = find_voice(args)
        check_distinct(args.video, args.jsonl, args.mp4)
        count = write_mp4(args.video, read_narrations(args.jsonl), args.mp4, words)
        told = [f"{n} sentences were {how}, because speech was behind" for how, n in count.items() if n]
        print("; ".join([f"written: {args.mp4}", *told]), file=sys.stderr)

    command_line(run)


if __name__ == "__main__":
    main()
