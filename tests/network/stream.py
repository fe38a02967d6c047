"""A stream between two hosts: `receive <address>` prints its payload in Gbit/s, `send <address> <seconds>` sends it."""

import socket
import sys
import time

PORT = 5000


def receive(address: str) -> None:
    with socket.create_server((address, PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        buffer = bytearray(1 << 20)
        received = 0
        start = end = None
        while size := connection.recv_into(buffer):
            end = time.perf_counter()
            if start is None:
                start = end
            else:
                received += size
        print(8e-9 * received / (end - start), received)


def send(address: str, seconds: float) -> None:
    with socket.create_connection((address, PORT)) as connection:
        data = memoryview(bytes(1 << 18))
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.send(data)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], float(sys.argv[3]))
