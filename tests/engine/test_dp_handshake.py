"""The coordinator's port: who may take part, and what happens to those who may not."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import zmq

from minivllm.config import EngineArgs, ParallelConfig
from minivllm.data_parallel import messages
from minivllm.data_parallel.coordinator import HELD_SECONDS, CoordinatorSetup, RankHolders
from minivllm.data_parallel.messages import (
    VERSION,
    CoordinatorLog,
    FrontendWelcome,
    HelloFrontend,
    HelloNode,
    LoadReport,
    Loads,
    NodeAlive,
    NodeWelcome,
    Refused,
    ReplicaDied,
    ScaleReplicas,
)
from minivllm.distributed.sockets import HANDSHAKE_SECONDS, KeyPair, Sockets, check_may_listen, load_key_file, make_key_file
from minivllm.engine.core_messages import ReplicaLoad
from minivllm.errors import ConfigError
from minivllm.executor.processes import ChildProcess


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Coordinator:
    """A coordinator with a key, and an API server that has introduced itself to it."""

    def __init__(self, tmp_path):
        make_key_file(tmp_path / "key")
        self.key, self.port = load_key_file(tmp_path / "key"), free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"
        setup = CoordinatorSetup(
            self.address, "tcp://127.0.0.1:0", f"ipc://{tmp_path}/loads", self.key, 1, 4, config_hash="right", log_level=30
        )
        self.process = ChildProcess("minivllm.data_parallel.coordinator", setup, 1)
        self.sockets = Sockets(self.key)
        welcome = self.ask(HelloFrontend(0, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"))
        assert isinstance(welcome, FrontendWelcome)
        self.loads = self.sockets.connect(zmq.SUB, welcome.publish_address, SUBSCRIBE=b"")
        self.published(Loads)

    def ask(self, message, key=None, seconds=10):
        sockets = self.sockets if key is None else Sockets(key)
        with sockets.connect(zmq.DEALER, self.address, LINGER=0) as handshake:
            handshake.send(message if isinstance(message, bytes) else messages.encode(message))
            answer = messages.decode_from_handshake(handshake.recv()) if handshake.poll(1000 * seconds) else None
        if key is not None:
            sockets.close()
        return answer

    def node(self, *ranks, version=VERSION, config_hash="right", node_id="node", **options):
        return self.ask(HelloNode(version, config_hash, list(ranks), node_id), **options)

    def published(self, kind, seconds=10):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.loads.poll(100):
                message = messages.decode_published(self.loads.recv())
                if isinstance(message, kind):
                    return message
        raise AssertionError("nothing was published")


@pytest.fixture
def coordinator(tmp_path):
    made = Coordinator(tmp_path)
    yield made
    assert made.process.poll() is None
    made.sockets.close()
    made.process.shutdown()


def test_nodes_with_the_same_options_are_welcome_and_others_are_told_why_not(coordinator):
    welcome = coordinator.node(0, 1)
    assert isinstance(welcome, NodeWelcome)
    assert (welcome.input_addresses, welcome.output_addresses) == (["tcp://127.0.0.1:1"], ["tcp://127.0.0.1:2"])
    assert "options differ" in coordinator.node(2, config_hash="other").message
    assert "install the same version" in coordinator.node(2, version="0.0.0").message
    for ranks in ((4,), (-1,), (3, 4)):
        assert "ranks 0 to 3" in coordinator.node(*ranks).message


def test_loads_are_published_and_what_is_no_load_is_dropped(coordinator):
    welcome = coordinator.node(2)
    reports = coordinator.sockets.connect(zmq.PUSH, welcome.report_address)
    reports.send(b"garbage")
    reports.send(messages.encode(LoadReport(2, ReplicaLoad(3, 4, 0.5))))
    reports.send(messages.encode(LoadReport(77, ReplicaLoad(3, 4, 0.5))))
    assert coordinator.published(Loads).loads == {2: ReplicaLoad(3, 4, 0.5)}
    died = ReplicaDied(2, 5, "its process ended", True, False, 1, "gone")
    reports.send(messages.encode(died))
    assert coordinator.published(ReplicaDied) == died


def test_how_many_replicas_there_are_to_be_is_published_at_once_and_nodes_may_have_so_many(coordinator):
    with coordinator.sockets.connect(zmq.DEALER, coordinator.address, LINGER=0) as handshake:
        handshake.send(messages.encode(ScaleReplicas(6)))
        assert coordinator.published(Loads, seconds=2).size == 6
    assert isinstance(coordinator.node(5), NodeWelcome)
    assert "ranks 0 to 5" in coordinator.node(6).message


def test_a_rank_belongs_to_its_node_for_as_long_as_that_is_alive(coordinator):
    welcome = coordinator.node(1, 2, node_id="first")
    reports = coordinator.sockets.connect(zmq.PUSH, welcome.report_address)
    is_over = threading.Event()

    def live():
        while not is_over.wait(0.1):
            reports.send(messages.encode(NodeAlive("first", [1, 2])))
        reports.send(messages.encode(NodeAlive("first", [])))

    alive = threading.Thread(target=live)
    alive.start()
    assert "Another node has these replicas" in coordinator.node(2, 3, node_id="second").message
    assert isinstance(coordinator.node(3, node_id="third"), NodeWelcome)
    is_over.set()
    alive.join()
    assert isinstance(coordinator.node(2, node_id="second"), NodeWelcome), "it has given them back"
    start = time.monotonic()
    assert isinstance(coordinator.node(2, node_id="again"), NodeWelcome), "the second was not heard any more"
    assert 0.5 * HELD_SECONDS < time.monotonic() - start < 2 * HELD_SECONDS


def test_a_node_that_has_lost_its_ranks_is_told_when_it_is_heard_again_and_theirs_are_later(coordinator):
    """It was cut off, and another has taken its place."""
    with coordinator.sockets.connect(zmq.DEALER, coordinator.address, LINGER=0, IDENTITY=b"first") as first:
        first.send(messages.encode(HelloNode(VERSION, "right", [1, 2], "first")))
        assert first.poll(10_000)
        welcome = messages.decode_from_handshake(first.recv())
        reports = coordinator.sockets.connect(zmq.PUSH, welcome.report_address)
        second = coordinator.node(2, 3, node_id="second")
        assert second.epoch > welcome.epoch, "so its processes have larger incarnations, whatever the time is there"
        reports.send(messages.encode(NodeAlive("second", [2, 3])))
        reports.send(messages.encode(NodeAlive("first", [1, 2])))
        assert first.poll(10_000)
        assert "Another node has got these replicas" in messages.decode_from_handshake(first.recv()).message


def test_nobody_gets_the_ranks_of_the_api_servers_own_node_however_long_that_is_silent():
    holders = RankHolders("own")
    holders.hear("own", [0, 1], 0.0)
    holders.hear("other", [2], 100.0)
    assert holders.may_have("other", [1, 2], 99.0, 100.0) is False
    assert not holders.hear("other", [1, 2], 100.0)
    assert holders.hear("own", [0, 1], 101.0)


@pytest.mark.parametrize(
    ("others", "since", "may_have"),
    [
        ([], 0.0, True),
        ([("b", [1], 9.0)], 8.0, False),  # heard since it was asked for
        ([("b", [1], 9.0)], 9.5, None),  # perhaps it is gone
        ([("b", [1], 4.0)], 9.5, True),  # it is
        ([("b", [2], 9.0)], 8.0, True),
        ([("a", [1], 9.0)], 8.0, True),  # it asks again
        ([("b", [1], 9.0), ("b", [], 9.2)], 8.0, True),
    ],
)
def test_who_may_have_a_rank(others, since, may_have):
    holders = RankHolders()
    for node_id, ranks, now in others:
        holders.hear(node_id, ranks, now)
    assert holders.may_have("a", [0, 1], since, 10.0) is may_have


def test_what_is_no_message_is_refused_and_does_no_harm(coordinator):
    for data in (b"", b"\xc1", b"\x80", messages.encode(LoadReport(0, None)), bytes(10_000)):
        assert isinstance(coordinator.ask(data), Refused)
    assert "cannot be decoded" in coordinator.published(CoordinatorLog).text
    assert isinstance(coordinator.node(0), NodeWelcome)


def test_without_the_key_nobody_gets_in(coordinator):
    public, secret = (part.decode() for part in zmq.curve_keypair())
    assert coordinator.node(0, key=KeyPair(public, secret), seconds=0.5) is None
    assert "Refused a connection" in coordinator.published(CoordinatorLog).text
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(coordinator.address)
        plain.send(messages.encode(HelloNode(VERSION, "right", [0], "node")))
        assert not plain.poll(500)
    # who has found out the public half still lacks the secret one
    with zmq.Context() as context, context.socket(zmq.DEALER) as thief:
        thief.setsockopt(zmq.LINGER, 0)
        thief.setsockopt(zmq.CURVE_SERVERKEY, coordinator.key.public.encode())
        thief.setsockopt(zmq.CURVE_PUBLICKEY, public.encode())
        thief.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
        thief.connect(coordinator.address)
        thief.send(messages.encode(HelloNode(VERSION, "right", [0], "node")))
        assert not thief.poll(500)
    assert isinstance(coordinator.node(0), NodeWelcome)


def ask(friend):
    """Say hello until there is an answer, as a node does: on a busy machine the connection may be lost for a moment, and a message with it."""
    while friend.poll(0):  # late answers to an earlier hello
        friend.recv()
    for _ in range(30):
        friend.send(messages.encode(HelloNode(VERSION, "right", [1], "friend")))
        if friend.poll(2000):
            return messages.decode_from_handshake(friend.recv())
    pytest.fail("no answer")


@pytest.mark.long
def test_strangers_that_only_connect_take_no_more_than_some_descriptors_and_friends_stay(coordinator):
    """Two hundred idle connections: who is there stays, and who comes later gets in when they have had their time."""
    with coordinator.sockets.connect(zmq.DEALER, coordinator.address, LINGER=0) as friend:
        assert isinstance(ask(friend), NodeWelcome)
        strangers = []
        for _ in range(200):
            try:
                strangers.append(socket.create_connection(("127.0.0.1", coordinator.port)))
            except OSError:
                break
            time.sleep(0.002)
        assert "show no key: no new ones for a moment" in coordinator.published(CoordinatorLog).text
        with pytest.raises(OSError):
            strangers.append(socket.create_connection(("127.0.0.1", coordinator.port)))
        assert isinstance(ask(friend), NodeWelcome)
        assert isinstance(coordinator.node(2, node_id="later", seconds=4 * HANDSHAKE_SECONDS), NodeWelcome)
    for stranger in strangers:
        stranger.close()


def test_a_handshake_that_was_overheard_is_of_no_use(coordinator):
    """What a node has sent, byte by byte, sent once more."""
    heard, connections = bytearray(), []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def overhear():
            ours, _ = listener.accept()
            theirs = socket.create_connection(("127.0.0.1", coordinator.port))
            connections.extend((ours, theirs))

            def back():
                while data := theirs.recv(4096):
                    ours.sendall(data)

            threading.Thread(target=back, daemon=True).start()
            while data := ours.recv(4096):
                heard.extend(data)
                theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)

        threading.Thread(target=overhear, daemon=True).start()
        with coordinator.sockets.connect(zmq.DEALER, f"tcp://127.0.0.1:{listener.getsockname()[1]}", LINGER=0) as node:
            node.send(messages.encode(HelloNode(VERSION, "right", [0], "node")))
            assert node.poll(10_000)
            first = len(node.recv())
    assert len(heard) > 300
    with socket.create_connection(("127.0.0.1", coordinator.port)) as replay:
        replay.settimeout(2)
        replay.sendall(bytes(heard))
        answer = b""
        try:
            while data := replay.recv(4096):
                answer += data
        except OSError:
            pass
    assert len(answer) < 64 + 200 + first, "greeting and the answer to its first message; but it is not let in"
    assert "Refused a connection" in coordinator.published(CoordinatorLog).text
    assert isinstance(coordinator.node(0), NodeWelcome)
    for connection in connections:
        connection.close()


def test_keys_are_made_and_read_and_guarded(tmp_path):
    file = tmp_path / "key"
    make_key_file(file)
    assert file.stat().st_mode & 0o777 == 0o600
    key = load_key_file(file)
    assert len(key.public) == len(key.secret) == 40
    with pytest.raises(ConfigError, match="name a new file"):
        make_key_file(file)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="Other users may read the key"):
        load_key_file(file)
    with pytest.raises(ConfigError, match=r"There is no key file .*`minivllm make-key"):
        load_key_file(tmp_path / "nothing")
    for content in ("", "{}", '{"public": "a", "secret": "b"}', f'{{"public": "{"0" * 40}", "secret": "{key.secret}"}}'):
        file.write_text(content)
        file.chmod(0o600)
        with pytest.raises(ConfigError, match="is not a key file"):
            load_key_file(file)


def test_nothing_listens_where_others_can_connect_without_a_key():
    key = KeyPair("a", "b")
    check_may_listen("127.0.0.1", None)
    check_may_listen("::1", None)
    check_may_listen("10.1.2.3", key)
    with pytest.raises(ConfigError, match=r"there is no data_parallel_key_file: anyone could use the replicas"):
        check_may_listen("10.1.2.3", None)
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="nobody can connect"):
            check_may_listen(host, key)
    with pytest.raises(ConfigError, match="is no address"):
        check_may_listen("no such host", key)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_parallel_size": 2, "data_parallel_start_rank": 2, "data_parallel_size_local": 1}, "There are replicas 2 to 2"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 3}, "There are replicas 0 to 2"),
        ({"data_parallel_backend": "slurm"}, "data_parallel_backend is 'slurm'"),
        ({"data_parallel_backend": "ray", "data_parallel_size_local": 0}, "leave data_parallel_size_local out"),
        ({"data_parallel_backend": "ray", "data_parallel_start_rank": 1}, "leave data_parallel_start_rank out"),
        ({"data_parallel_backend": "ray", "data_parallel_key_file": "replicas.key"}, "leave data_parallel_key_file out"),
        ({"data_parallel_size": 2, "data_parallel_size_local": -1}, "data_parallel_size_local is -1"),
        ({"data_parallel_rpc_port": 70_000}, "at most 65535"),
        ({"data_parallel_size": 10**6}, "at most 65535"),
    ],
)
def test_ranks_that_cannot_be_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        EngineArgs(**options)


def test_who_is_where():
    assert list(ParallelConfig(data_parallel_size=4).local_ranks) == [0, 1, 2, 3]
    elsewhere = ParallelConfig(data_parallel_size=4, data_parallel_size_local=2, data_parallel_start_rank=2)
    assert list(elsewhere.local_ranks) == [2, 3] and not elsewhere.is_on_one_machine and elsewhere.has_replicas
    assert not ParallelConfig().has_replicas
    assert ParallelConfig(data_parallel_size_local=0).has_replicas
    assert ParallelConfig(data_parallel_backend="ray").has_replicas, "one, on some node"
