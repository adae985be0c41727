"""Latency of `hf-deqnar serve` for concurrent clients on this machine, as a Markdown table.

    python experiments/server_latency.py --sentences tests/data/pairs.jsonl

Every client sends one sentence, waits for its translation, and sends the next.
"""

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import time

import httpx

from hf_deqnar.data.parallel_text import read_parallel


async def client(session: httpx.AsyncClient, texts: list[str], count: int, number: int) -> list[float]:
    seconds = []
    for request in range(count):
        text = texts[(number * 7 + request) % len(texts)]
        start = time.perf_counter()
        answer = await session.post("/translate", json={"q": text, "source": "en", "target": "de"})
        answer.raise_for_status()
        seconds.append(time.perf_counter() - start)
    return seconds


async def measure(url: str, texts: list[str], clients: int, requests: int) -> tuple[list[float], float]:
    async with httpx.AsyncClient(base_url=url, timeout=300) as session:
        await client(session, texts, 3, 0)
        start = time.perf_counter()
        found = await asyncio.gather(*(client(session, texts, requests // clients, n) for n in range(clients)))
        return [second for seconds in found for second in seconds], time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", default="tests/data/pairs.jsonl")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=320)
    parser.add_argument("--threads", default="1")
    options = parser.parse_args()
    texts = [pair.source for pair in read_parallel(options.sentences, "en", "de")]
    command = [sys.executable, "-m", "hf_deqnar.cli.main", "serve", "--port", "0", "--threads", options.threads]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = re.fullmatch(r"Listening on (\S+)\n", server.stdout.readline())[1]
        print("| clients | median, ms | 95th percentile, ms | sentences per second |")
        print("|---------|------------|---------------------|----------------------|")
        for clients in options.clients:
            seconds, total = asyncio.run(measure(url, texts, clients, options.requests))
            high = statistics.quantiles(seconds, n=20)[-1]
            middle = statistics.median(seconds)
            print(f"| {clients} | {middle * 1000:.0f} | {high * 1000:.0f} | {len(seconds) / total:.1f} |")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
