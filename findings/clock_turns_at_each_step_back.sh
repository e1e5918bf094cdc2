#!/usr/bin/env bash
# Expected: pictures that come over WebRTC have the times they were sent with, up to a common start.
# The receiver takes each step back of the RTP clock for a turn of its 32 bits and adds 2^32 / 90000 s = 47,721.86 s.
# H.264 with B-frames that is passed on as it is (decode=False) steps back at each third picture; a film that is played
# in a loop does at each new round. The round itself comes at once, not in its time: the player's clock goes on.
# The control, the same film without B-frames and without a loop, is right.
# Versions: aiortc 1.16.0, PyAV 18.1.0.
# Who meets it: whoever reads a WebRTC camera or test film with aiortc, and goes by the times of its pictures.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet aiortc==1.16.0 av==18.1.0 numpy==2.4.6
cd "$place"
"$place/venv/bin/python" - <<'PYTHON'
import asyncio
import sys
import time
from importlib.metadata import version
import av
import numpy
from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpSender
from aiortc.contrib.media import MediaPlayer

print("aiortc", version("aiortc"), "PyAV", av.__version__)


def film(path, pictures, between):
    with av.open(path, "w") as out:
        stream = out.add_stream("libx264", rate=30, options={"bf": str(between), "b-adapt": "0", "g": "30"})
        stream.width = stream.height = 64
        for i in range(pictures):
            frame = av.VideoFrame.from_ndarray(numpy.full((64, 64, 3), 40 + i, numpy.uint8))
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


async def receive(path, pictures, **how):
    """The times of the first pictures that a second peer in this process gets, and the largest step between two."""
    alone = RTCConfiguration(iceServers=[])
    camera, reader, times, done = RTCPeerConnection(alone), RTCPeerConnection(alone), [], asyncio.Event()

    @reader.on("track")
    async def read(track):
        while len(times) < pictures:
            times.append((await track.recv()).time)
        done.set()

    camera.addTrack(MediaPlayer(path, **how).video)
    codecs = [codec for codec in RTCRtpSender.getCapabilities("video").codecs if codec.mimeType == "video/H264"]
    camera.getTransceivers()[0].setCodecPreferences(codecs)
    await camera.setLocalDescription(await camera.createOffer())
    await reader.setRemoteDescription(camera.localDescription)
    await reader.setLocalDescription(await reader.createAnswer())
    await camera.setRemoteDescription(reader.localDescription)
    await asyncio.wait_for(done.wait(), 60)
    await asyncio.gather(camera.close(), reader.close())
    return times


async def rounds(path, pictures):
    """Seconds that the first and the second round of a film take when it is played in a loop."""
    track, marks = MediaPlayer(path, loop=True).video, [time.time()]
    for _ in range(2):
        for _ in range(pictures):
            await track.recv()
        marks.append(time.time())
    track.stop()
    return marks[1] - marks[0], marks[2] - marks[1]


async def main():
    film("plain.ts", 90, 0)
    film("between.ts", 90, 2)
    film("short.mp4", 60, 0)
    plain = await receive("plain.ts", 60, decode=False)
    between = await receive("between.ts", 60, decode=False)
    loop = await receive("short.mp4", 130, loop=True)
    first, second = await rounds("short.mp4", 60)
    print("no B-frames, passed on:", *(round(t, 2) for t in plain[:6]), "...", round(plain[-1], 2))
    print("B-frames, passed on:   ", *(round(t, 2) for t in between[:6]), "...", round(between[-1], 2))
    print("in a loop of 2 s:      ", *(round(t, 2) for t in loop[56:64]), "...", round(loop[-1], 2))
    print(f"of a loop of 2 s the first round takes {first:.2f} s, the second one {second:.2f} s")
    turn = 2**32 / 90000
    steps = [[b - a for a, b in zip(times, times[1:])] for times in (plain, between, loop)]
    turns = [[step / turn for step in some if abs(step) > 1] for some in steps]
    whole = all(abs(step - round(step)) < 1e-4 for some in turns for step in some)
    print("turns of the clock added:", *(sum(round(step) for step in some if step > 0) for some in turns))
    return whole and not turns[0] and len(turns[1]) > 20 and len(turns[2]) == 2 and first > 1.5 and second < 0.7


sys.exit(0 if asyncio.run(main()) else "changed")
PYTHON
