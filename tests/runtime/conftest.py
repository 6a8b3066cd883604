"""What several files here use."""

import os
import subprocess

import pytest


@pytest.fixture
def two_hosts():
    """Two network namespaces, joined by a cable: as (what starts a command there, its address)."""
    names = [f"pipelab{os.getpid()}{end}" for end in "ab"]
    steps = [f"netns add {name}" for name in names]
    steps.append(f"link add pl0 netns {names[0]} type veth peer name pl0 netns {names[1]}")
    addresses = ["10.213.0.1", "10.213.0.2"]
    for name, address in zip(names, addresses, strict=True):
        steps += [f"-n {name} address add {address}/24 dev pl0"]
        steps += [f"-n {name} link set {device} up" for device in ("pl0", "lo")]
    try:
        for step in steps:
            done = subprocess.run(["ip", *step.split()], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield [
            (["ip", "netns", "exec", name, "env", "GLOO_SOCKET_IFNAME=pl0"], address)
            for name, address in zip(names, addresses, strict=True)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
