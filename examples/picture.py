"""Ask the bundled model that sees what a picture shows, twice, and what the server encoded meanwhile.

Start it with `quire serve tiny-vision`, and give this `pip install openai`.
"""

from __future__ import annotations

import argparse
import base64
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from openai import OpenAI

COUNTED = "quire_encoder_runs_total", "quire_picture_hits_total", "quire_prefix_cache_hits", "quire_kv_layer_bytes"


def ask(client: OpenAI, picture: bytes, question: str) -> None:
    """Print the answer as it comes."""
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    content: Any = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": url}}]
    stream = client.chat.completions.create(
        model="tiny-vision", messages=[{"role": "user", "content": content}], temperature=0, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--picture", type=Path, default=Path(__file__).parent / "circle.png", help="a PNG")
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="unused")
    for _ in range(2):
        ask(client, args.picture.read_bytes(), "What colour and shape is this?")
        with urlopen(f"{args.url}/metrics", timeout=10) as told:
            print(*(line for line in told.read().decode().splitlines() if line.startswith(COUNTED)), sep="\n")


if __name__ == "__main__":
    main()
