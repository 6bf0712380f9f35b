"""Somebody removes the folder of the sockets, as cleaners of /tmp do: it is made again, or it is said that this cannot be."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from minivllm.distributed import sockets as module
from minivllm.distributed.sockets import LOOK_SECONDS, Sockets


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


@pytest.fixture
def server(tmp_path):
    """Sockets, one of which listens in a folder."""
    (tmp_path / "sockets").mkdir(0o700)
    sockets = Sockets()
    listening, address = sockets.bind(zmq.ROUTER, f"ipc://{tmp_path}/sockets/requests")
    assert sockets.restore_files() is None
    yield SimpleNamespace(sockets=sockets, listening=listening, address=address, folder=tmp_path / "sockets")
    sockets.close()


def connect(server, name):
    client = server.sockets.connect(zmq.DEALER, server.address, IDENTITY=name)
    client.send(b"hello")
    return client


def test_a_folder_that_was_removed_is_made_again_and_old_connections_stay(clock, server):
    old = connect(server, b"old")
    assert server.listening.recv_multipart() == [b"old", b"hello"]
    for round in range(2):
        shutil.rmtree(server.folder)
        assert server.sockets.restore_files() is None, "it has just looked"
        clock.now += LOOK_SECONDS
        assert "removed, perhaps by a cleaner, and made again." in server.sockets.restore_files()
        assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
        new = connect(server, f"new {round}".encode())
        assert server.listening.recv_multipart()[0] == f"new {round}".encode()
        for client, name in ((old, b"old"), (new, f"new {round}".encode())):
            server.listening.send_multipart([name, b"still here"])
            assert client.recv() == b"still here"
    clock.now += LOOK_SECONDS
    assert server.sockets.restore_files() is None


def test_a_file_that_was_removed_alone_is_made_again(clock, server):
    (server.folder / "requests").unlink()
    clock.now += LOOK_SECONDS
    assert server.sockets.restore_files()
    connect(server, b"new")
    assert server.listening.recv_multipart()[0] == b"new"


def test_files_that_are_gone_stay_so_in_a_process_that_is_about_to_exit(clock, server):
    shutil.rmtree(server.folder)
    clock.now += LOOK_SECONDS
    assert server.sockets.restore_files(unless=lambda: True) is None
    assert not server.folder.exists()
    clock.now += LOOK_SECONDS
    assert server.sockets.restore_files(unless=lambda: False)
    assert server.folder.exists()


def test_a_process_knows_that_its_parent_has_ended():
    program = """
        import sys, threading
        from minivllm.executor import processes
        print(processes.parent_has_ended(), flush=True)
        sys.stdin.readline()
        processes.os._exit = lambda status: ended.set()  # it lives on, to be asked
        ended = threading.Event()
        processes.exit_with_parent()
        print(processes.parent_has_ended(), flush=True)
        ended.wait()
        print(processes.parent_has_ended(), flush=True)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "False\n", "nobody watches the parent"
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "False\n"
    child.stdin.close()
    assert child.stdout.readline() == "True\n"
    assert child.wait() == 0


def test_what_cannot_be_made_again_is_said_once_and_tried_again(clock, server):
    shutil.rmtree(server.folder)
    server.folder.mkdir(0o777)
    server.folder.chmod(0o777)  # somebody else's, perhaps
    clock.now += LOOK_SECONDS
    said = server.sockets.restore_files()
    assert (
        "cannot be made again (others have made a folder there): processes that are started from now on cannot connect." in said
    )
    for _ in range(3):
        clock.now += LOOK_SECONDS
        assert server.sockets.restore_files() is None
    assert list(server.folder.iterdir()) == []
    server.folder.rmdir()
    clock.now += LOOK_SECONDS
    assert "made again" in server.sockets.restore_files()
    connect(server, b"new")
    assert server.listening.recv_multipart()[0] == b"new"


def test_the_folder_that_is_made_at_the_start_would_be_made_again():
    from minivllm.engine.core_handle import make_socket_folder

    folder = Path(make_socket_folder())
    module.make_private_folder(folder)
    folder.rmdir()
