#!/usr/bin/env bash
# Expected: pictures of a live MJPEG camera carry the time at which they were taken or came.
# FFmpeg numbers them at 25 a second, however slowly they come, and leaves the camera's X-Timestamp unread.
# Here 4 pictures a second come for about 3 s, and their times say 0.44 s: "one picture a second" takes one in 6 s.
# Versions: PyAV 18.1.0 (its FFmpeg is printed), pillow 13.0.0 for the camera's pictures.
# Who meets it: whoever narrates a small network camera (ESP32, printers, doors): clock and steps run 6 times too slow.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --no-deps av==18.1.0 pillow==13.0.0
"$place/venv/bin/python" - <<'PYTHON'
import io, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
import av
from PIL import Image

PICTURES = 12


class Camera(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace;boundary=picture")
        self.end_headers()
        for number in range(PICTURES):
            jpeg = io.BytesIO()
            Image.new("RGB", (64, 48), (20 * number, 0, 0)).save(jpeg, "JPEG")
            head = f"Content-Length: {len(jpeg.getvalue())}\r\nX-Timestamp: {time.time():.6f}\r\n"
            part = f"--picture\r\nContent-Type: image/jpeg\r\n{head}\r\n".encode()
            self.wfile.write(part + jpeg.getvalue() + b"\r\n")
            time.sleep(0.25)


server = HTTPServer(("127.0.0.1", 0), Camera)
threading.Thread(target=server.serve_forever, daemon=True).start()
start = time.monotonic()
with av.open(f"http://127.0.0.1:{server.server_port}/", timeout=30) as camera:
    pictures = camera.decode(video=0)
    times = [round(float(next(pictures).time), 3) for _ in range(PICTURES)]
print("PyAV", av.__version__, "FFmpeg", av.ffmpeg_version_info)
print(f"{PICTURES} pictures came within {time.monotonic() - start:.1f} s; their times: {times}")
if times != [round(0.04 * number, 3) for number in range(PICTURES)]:
    raise SystemExit("changed: the times are no longer those of 25 pictures a second")
PYTHON
