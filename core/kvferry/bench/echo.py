"""A process that sends back what it gets over ZeroMQ; run as ``python -m kvferry.bench.echo``."""

import sys

import zmq


def main() -> None:
    """Say the endpoint, then echo until the input ends."""
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        sys.stdout.write(f'{{"endpoint": "tcp://127.0.0.1:{port}"}}\n')
        sys.stdout.flush()
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(sys.stdin, zmq.POLLIN)
        while socket in dict(poller.poll()):
            socket.send(socket.recv())


if __name__ == "__main__":
    main()
