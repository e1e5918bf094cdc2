"""Narrations as a subtitle track and as speech: in an .mp4, or while a stream goes on
(stream.py --speak).

    python -m streams.speech video.mp4 narrations.jsonl --mp4 out.mp4 [--speak]
                             [--voice-command "piper -m x.onnx -f -"]

The video's packets are copied unchanged. The sentences (stream.py --jsonl) become a subtitle track
that a viewer can switch off. With --speak, a voice says each sentence when its segment ends, or
after the sentence before. The video's own sound becomes 12 dB quieter. The voice is espeak-ng
(GPL-3, called as a program), on macOS also `say`, or any command that reads text and writes a WAV.
Other tracks of the video are left out.
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
from support.common.disk import check_distinct, replacing
from support.common.errors import BadData, command_line, first_line
from support.common.options import Parser
from support.common.progress import progress
from support.common.text import one_line
from support.files.video import LONGEST_GAP, Video, believed_gap

RATE = 48000                            # samples per second of all sound that is written
BLOCK = 1024                            # samples that are mixed at once
FASTER = 3.0                            # seconds behind from which a sentence is spoken faster,
TEMPO = 1.5                             # so many times faster,
TOO_LATE = 6.0                          # and seconds behind from which it is left out
QUIETER = 10 ** (-12 / 20)              # 12 dB
COPIED = ("aac", "ac3", "mp3", "opus")  # codecs of sound that an .mp4 can hold as it is
LONGEST_WAIT = 60                       # seconds that a voice may take for a sentence
MILLISECOND = Fraction(1, 1000)
LONGEST_CAPTION = 2 ** 16 - 1           # bytes: its length is stored in two

# each reads text on stdin and writes a WAV to stdout; `say` can write only files
SAY_TO_STDOUT = ('f=$(mktemp) && say --file-format=WAVE --data-format=LEI16@22050 -o "$f" -f - && '
                 'cat "$f" && rm "$f"')
VOICES = {"espeak-ng": ["espeak-ng", "--stdout"],
          "say": ["sh", "-c", SAY_TO_STDOUT]}

# programs that play a file
PLAYERS = ("afplay", "aplay -q", "paplay", "pw-play", "ffplay -nodisp -autoexit -loglevel error")

# the encoder of subtitles requires a description of their looks
ASS = (b"[Script Info]\nScriptType: v4.00+\n\n"
       b"[V4+ Styles]\nFormat: Name, Fontname, Fontsize\nStyle: Default,Arial,16\n\n"
       b"[Events]\nFormat: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text\n")


# ---------------------------------------------------------------------- a voice

def speech_options(parser: argparse.ArgumentParser):
    parser.add_argument("--speak", action="store_true",
                        help="speak the narrations (espeak-ng; on macOS also say)")
    parser.add_argument("--voice-command", metavar="COMMAND",
                        help="speak them with this command: text on stdin, WAV on stdout")


def find_voice(args: argparse.Namespace) -> list[str] | None:
    """The words of the command that speaks, by `speech_options`; None without these options.

    BadData if there is no such program.
    """
    if args.voice_command is not None:
        try:
            words = shlex.split(args.voice_command)
        except ValueError as error:
            message = f"--voice-command {args.voice_command}: {first_line(error)}"
            raise BadData(message) from None
        program = words[0] if words else "of no name"
        if not words or not shutil.which(program):
            raise BadData(f"--voice-command: there is no program {program}; give one that reads "
                          f"text and writes a WAV")
        return words
    if not args.speak:
        return None
    for program, words in VOICES.items():
        if shutil.which(program):
            return words
    raise BadData('there is no voice: apt install espeak-ng (macOS: brew install espeak-ng), or '
                  'give another one with --voice-command "..."')


def speak(words: list[str], text: str, tempo: float = 1.0) -> np.ndarray:
    """A sentence as sound, float32 [n], RATE samples a second.

    words: of the command that speaks; tempo: how many times faster than the voice.
    BadData if the voice fails or writes no WAV.
    """
    name = f"the voice ({words[0]})"
    try:
        process = subprocess.run(words, input=f"{text}\n".encode(), capture_output=True,
                                 timeout=LONGEST_WAIT)
    except subprocess.TimeoutExpired:
        raise BadData(f"{name} took more than {LONGEST_WAIT} s for one sentence; "
                      f"choose another one") from None
    if process.returncode:
        message = end_of_message(process.stderr)
        raise BadData(f"{name} fails with exit code {process.returncode}: {message}")
    filters = [] if tempo == 1 else [("atempo", str(tempo))]
    pieces = [np.zeros((1, 0), np.float32)]             # a WAV may hold no sample
    try:
        for frame in listen(io.BytesIO(process.stdout), "mono", filters, "wav"):
            pieces.append(frame.to_ndarray())
    except av.FFmpegError:
        raise BadData(f"{name} wrote no WAV to stdout ({len(process.stdout)} bytes)") from None
    return np.concatenate(pieces, 1)[0]


def end_of_message(stderr: bytes) -> str:
    """The last 200 characters that a program wrote to stderr, in one line."""
    return one_line(stderr.decode(errors="replace"))[-200:]


def listen(source, layout: str, filters: Iterable[tuple[str, str]] = (),
           form: str | None = None) -> Iterator[av.AudioFrame]:
    """The sound of a file, float32 [channels, n], RATE samples a second; nothing if it has none.

    layout: "mono" or "stereo"; filters: (name, arguments) of FFmpeg's; form: the file's format.
    """
    with av.open(source, format=form) as container:
        stream = container.streams.best("audio")
        if stream is None:
            return
        graph = av.filter.Graph()
        nodes = [graph.add_abuffer(template=stream)]
        wanted_format = f"sample_fmts=fltp:sample_rates={RATE}:channel_layouts={layout}"
        nodes.append(graph.add("aformat", wanted_format))
        for name, arguments in filters:
            nodes.append(graph.add(name, arguments))
        nodes.append(graph.add("abuffersink"))
        graph.link_nodes(*nodes).configure()

        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except av.FFmpegError:                      # a damaged packet is skipped
                frames = []
            if packet.dts is None:                      # the last packet; None ends the graph's input
                frames = [*frames, None]
            for frame in frames:
                graph.push(frame)
                try:
                    while True:
                        yield graph.pull()
                except (av.BlockingIOError, av.EOFError):
                    pass


# ---------------------------------------------------------------------- sound, in time

def utterances(rows: list[dict], words: list[str],
               count: Counter) -> Iterator[tuple[int, np.ndarray]]:
    """(first sample, sound [n]) of each sentence, in order.

    count: is increased by the number of sentences that are "faster" or "left out".
    """
    free = 0                                            # first sample after the last utterance
    for row in sorted(rows, key=lambda row: row["end"]):
        if row.get("repeat"):                           # the same sentence has just been spoken
            continue
        begin = round(row["end"] * RATE)
        behind = (free - begin) / RATE
        if behind > TOO_LATE:
            count["left out"] += 1
            continue
        tempo = 1.0
        if behind > FASTER:
            count["faster"] += 1
            tempo = TEMPO
        sound = speak(words, row["text"], tempo)
        begin = max(begin, free)
        free = begin + len(sound)
        yield begin, sound


def speech(spoken: Iterable[tuple[int, np.ndarray]]) -> Iterator[np.ndarray]:
    """Utterances as one sound: pieces [1, n], with silence between them."""
    position = 0                                        # samples so far
    for begin, sound in spoken:
        yield from silence(begin - position, 1)
        yield sound[None]                               # [n] -> [1, n]
        position = begin + len(sound)


def silence(samples: int, channels: int) -> Iterator[np.ndarray]:
    """Pieces [channels, n] of at most a second; nothing for 0 samples."""
    for begin in range(0, samples, RATE):
        yield np.zeros((channels, min(RATE, samples - begin)), np.float32)


def sound_of_video(path: str, start: float, longest_gap: float) -> Iterator[np.ndarray]:
    """The video's sound from the time `start` [s] of its first picture, in pieces [2, n].

    Gaps in the sound become silence. Those above `longest_gap` [s], and steps back of more than a
    minute, are taken for a damaged clock, and left out.
    """
    position = 0                                        # samples so far
    for frame in listen(path, "stereo"):
        shift = 0                                       # samples that the frame begins too late
        if frame.pts is not None:
            seconds = float(frame.pts * frame.time_base) - start
            shift = round(seconds * RATE) - position
        # less is rounding, more is a damaged clock
        longest = longest_gap if shift > 0 else LONGEST_GAP
        if not RATE // 10 < abs(shift) <= longest * RATE:
            shift = 0
        yield from silence(shift, 2)
        samples = frame.to_ndarray()[:, max(0, -shift):]
        position += max(0, shift) + samples.shape[1]
        if samples.shape[1]:                            # the encoder takes no empty piece
            yield samples


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


def mix(spoken: Iterable[np.ndarray], background: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Speech [1, n] over a background [c, n] that becomes quieter, in blocks [c, up to BLOCK].

    After the shorter sound has ended, the longer one goes on alone.
    """
    pairs = zip_longest(blocks(spoken, BLOCK), blocks(background, BLOCK),
                        fillvalue=np.zeros((1, 0), np.float32))
    for over, under in pairs:
        length = max(over.shape[1], under.shape[1])
        over = np.pad(over, ((0, 0), (0, length - over.shape[1])))
        under = np.pad(under, ((0, 0), (0, length - under.shape[1])))
        yield np.clip(over + QUIETER * under, -1, 1)    # [1, n] + [c, n] -> [c, n]


# ---------------------------------------------------------------------- the file

def check_ours(path: str) -> None:
    """BadData if a file is there that `write_mp4` has not written: it has no track of subtitles."""
    if not Path(path).is_file():
        return
    try:
        with av.open(f"file:{path}") as file:
            if file.streams.subtitles:
                return
    except av.FFmpegError:                              # no video
        pass
    raise BadData(f"{path}: is there already, and this program has not written it; "
                  f"choose another name")


def write_mp4(video: str | Path, rows: list[dict], path: str | Path,
              words: list[str] | None = None) -> Counter:
    """Write the video with subtitles and, if there is a voice, with speech.

    words: of the command that speaks. Returns how many sentences were "faster" or "left out".
    Memory does not grow with the video's length. BadData if .mp4 cannot hold the video's packets.
    """
    Video(video)                                        # raises BadData if the video is damaged
    count = Counter()
    try:
        with replacing(path) as part, \
                av.open(f"file:{video}") as source, \
                av.open(f"file:{part}", "w", format="mp4",
                        options={"movflags": "+faststart"}) as target:
            tracks = mp4_tracks(source, target, rows, words, count)
            packets = heapq.merge(*tracks, key=lambda packet: packet.dts * packet.time_base)
            target.start_encoding()
            with progress(None, "speech", len(rows), "sentence", leave=False, delay=0.5) as bar:
                for packet in packets:
                    bar.update(1 if packet.stream.type == "subtitle" else 0)
                    target.mux(packet)
    except BadData:
        raise
    # PyAV raises ValueError for some codecs
    except (av.FFmpegError, ValueError) as error:
        raise BadData(f"{video}: its pictures cannot be copied into an .mp4 ({first_line(error)}); "
                      f"convert it first: "
                      f"ffmpeg -i {shlex.quote(str(video))} converted.mp4") from error
    return count


def mp4_tracks(source, target, rows: list[dict], words: list[str] | None,
               count: Counter) -> list[Iterator[av.Packet]]:
    """Add the tracks to the open file `target`; returns the packets of each.

    Times count from the first picture. The sound is copied if nothing is mixed into it and an .mp4
    can hold it.
    """
    pictures = source.streams.best("video")
    sound = source.streams.best("audio")
    start = (pictures.start_time or 0) * pictures.time_base
    duration = (source.duration or 0) / av.time_base    # seconds
    copies_sound = False
    if sound and not words:
        copies_sound = sound.codec_context.codec.canonical_name in COPIED

    tracks = []
    for stream in [pictures, sound] if copies_sound else [pictures]:
        copy = target.add_stream_from_template(stream)
        tracks.append(copied_packets(source.name, stream.index, copy, start))

    if words or sound and not copies_sound:
        pieces = []
        if sound:
            pieces = sound_of_video(source.name, float(start), believed_gap(duration))
        if words:
            pieces = mix(speech(utterances(rows, words, count)), pieces)
        layout = "stereo" if sound else "mono"
        tracks.append(sound_packets(pieces, target.add_stream("aac", rate=RATE, layout=layout)))

    captions = target.add_stream("mov_text")
    captions.codec_context.subtitle_header = ASS
    captions.time_base = MILLISECOND
    tracks.append(caption_packets(rows, captions))
    return tracks


def copied_packets(name: str, index: int, target, start: Fraction) -> Iterator[av.Packet]:
    """The packets of stream `index` of the file `name`, for the stream `target`.

    Their times count from `start` [s]. BadData if they have no times.
    """
    # Matroska stores no decoding times, and those of the first packets cannot be guessed. Such
    # packets wait for the first packet with a time, and get times back from there.
    waiting = []
    with av.open(name) as container:
        stream = container.streams[index]
        for end in container.demux(stream):
            if end.size:                                # the last packet is empty
                waiting.append(end)
            if end.dts is None:
                continue
            for distance, packet in enumerate(reversed(waiting)):
                packet.dts = end.dts
                if distance:
                    duration = round(1 / stream.average_rate / end.time_base)
                    packet.dts = end.dts - distance * duration
            for packet in waiting:
                shift = round(start / packet.time_base)
                packet.dts -= shift
                if packet.pts is not None:
                    packet.pts -= shift
                packet.stream = target
                yield packet
            waiting = []
    if waiting:
        path = name.removeprefix("file:")
        raise BadData(f"{path}: its packets have no times; convert it first")


def caption_packets(rows: list[dict], stream) -> Iterator[av.Packet]:
    """Each sentence while its segment lasts, or until the next one begins."""
    rows = sorted(rows, key=lambda row: row["start"])
    for row, next_row in zip_longest(rows, rows[1:]):
        end = row["end"]
        if next_row is not None:
            end = min(end, next_row["start"])
        text = one_line(row["text"]).encode()[:LONGEST_CAPTION]
        text = text.decode(errors="ignore").encode()    # no half a character at the cut
        # The packet is made here, because the encoder would read marks in the text.
        packet = av.Packet(len(text).to_bytes(2, "big") + text)
        packet.stream = stream
        packet.time_base = MILLISECOND
        packet.pts = packet.dts = round(1000 * row["start"])
        packet.duration = round(1000 * end) - packet.pts
        yield packet


def sound_packets(pieces: Iterable[np.ndarray], stream) -> Iterator[av.Packet]:
    """Sound [c, n], encoded; one channel becomes as many as the stream has."""
    channels = stream.codec_context.channels
    position = 0                                        # samples so far
    for piece in pieces:
        samples = np.repeat(piece, channels // len(piece), 0)
        frame = av.AudioFrame.from_ndarray(samples, "fltp", stream.codec_context.layout.name)
        frame.sample_rate = RATE
        frame.pts = position
        frame.time_base = Fraction(1, RATE)
        position += piece.shape[1]
        yield from stream.encode(frame)
    yield from stream.encode()


# ---------------------------------------------------------------------- live

class Speaker:
    """Speaks sentences while a stream goes on, with one process at a time.

    Sentences that come while another one is spoken wait; of those, only the newest is spoken.
    A context manager: leaving it waits for the last sentence to be spoken, after an error only for
    the sentence that is being spoken. Without an option of `speech_options` it says nothing.
    BadData if there is no program that speaks, or none that plays sound.
    """

    def __init__(self, args: argparse.Namespace):
        self.voice = find_voice(args)
        self.waiting = None                             # the next sentence
        self.ended = False
        self.change = Condition()                       # of these two
        self.thread = Thread(target=self.work, daemon=True)
        if self.voice:
            self.player = find_player()
            self.thread.start()

    def say(self, text: str):
        with self.change:
            self.waiting = text
            self.change.notify()

    def work(self):
        """Speak until the end, or until a voice or a player fails.

        Then one line says so, and the stream goes on.
        """
        while True:
            text = self.next()
            if text is None:
                return
            try:
                self.play(speak(self.voice, text))
            except (BadData, OSError) as error:
                tqdm.write(f"speech ends here: {error}", file=sys.stderr)
                return

    def next(self) -> str | None:
        """The next sentence, as soon as there is one; None at the end."""
        with self.change:
            self.change.wait_for(lambda: self.waiting is not None or self.ended)
            text = self.waiting
            self.waiting = None
            return text

    def play(self, sound: np.ndarray):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/sentence.wav"
            with wave.open(path, "wb") as file:
                file.setparams((1, 2, RATE, len(sound), "NONE", None))
                file.writeframes((32767 * sound.clip(-1, 1)).astype("<i2").tobytes())
            process = subprocess.run([*self.player, path], stdin=subprocess.DEVNULL,
                                     stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if process.returncode:
            raise BadData(f"{self.player[0]} fails: {end_of_message(process.stderr)}")

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        with self.change:
            self.ended = True
            if error:
                self.waiting = None
            self.change.notify()
        if self.voice:
            self.thread.join()


def find_player() -> list[str]:
    """The words of the first command of PLAYERS that is installed; BadData if none is."""
    commands = [command.split() for command in PLAYERS]
    for words in commands:
        if shutil.which(words[0]):
            return words
    programs = ", ".join(words[0] for words in commands)
    raise BadData(f"there is no program to play sound: apt install alsa-utils "
                  f"(looked for {programs})")


def main():
    parser = Parser(prog="python -m streams.speech",
                    description="Add narrations to a video, as subtitles and as speech.")
    parser.add_argument("video", help="video file")
    parser.add_argument("jsonl", type=Path,
                        help="its narrations, as stream.py --jsonl writes them")
    parser.add_argument("--mp4", required=True, metavar="FILE",
                        help="the video with a track of subtitles")
    speech_options(parser)
    args = parser.parse_args()

    def run():
        words = find_voice(args)
        check_distinct(args.video, args.jsonl, args.mp4)
        check_ours(args.mp4)
        count = write_mp4(args.video, read_narrations(args.jsonl), args.mp4, words)
        messages = [f"written: {args.mp4}"]
        for how in ("faster", "left out"):
            if count[how]:
                messages.append(f"{count[how]} sentences were {how}, because speech was behind")
        print("; ".join(messages), file=sys.stderr)

    command_line(run)


if __name__ == "__main__":
    main()
