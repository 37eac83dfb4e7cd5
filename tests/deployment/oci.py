"""Run an image as docker-compose.yml says, with runc: no engine, the same restrictions.

    with Container(rootfs, image_config, compose_service, volumes, port=...) as container:
        container.run("id")        # a command inside, beside the server
        container.stop("TERM")     # the exit status of the server

Only the network differs: the container uses the machine's own, and the server listens on `port` of 127.0.0.1.
"""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from pathlib import Path
from typing import Any

MEBIBYTE = 2**20
CPU_PERIOD = 100_000  # microseconds


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([mg])", text).groups()
    return int(number) * MEBIBYTE * (1024 if unit == "g" else 1)


def mount(destination: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source, "options": list(options)}


def mounts_of(service: dict[str, Any], volumes: Path) -> list[dict[str, Any]]:
    """The temporary file systems of the service, and its named volumes as folders in `volumes`."""
    temporary = [text.partition(":")[::2] for text in service["tmpfs"]]
    named = [text.split(":") for text in service["volumes"]]
    return [
        *(mount(target, "tmpfs", "tmpfs", "nosuid", "nodev", options) for target, options in temporary),
        *(mount(target, "bind", str(volumes / name), "rbind", "rw") for name, target in named),
    ]


def process_of(image: dict[str, Any], service: dict[str, Any], port: int) -> dict[str, Any]:
    """What runs: the entry point of the image, with the rights that the service leaves."""
    user, group = map(int, image["User"].split(":"))
    assert service["cap_drop"] == ["ALL"]
    return {
        "terminal": False,
        "user": {"uid": user, "gid": group},
        "args": image["Entrypoint"],
        "env": [*image["Env"], "ATTNCACHE_HOST=127.0.0.1", f"ATTNCACHE_PORT={port}"],
        "cwd": image["WorkingDir"],
        "capabilities": {},
        "noNewPrivileges": "no-new-privileges:true" in service["security_opt"],
    }


def limits_of(service: dict[str, Any]) -> dict[str, Any]:
    return {
        "pids": {"limit": service["pids_limit"]},
        "memory": {"limit": size(service["mem_limit"])},
        "cpu": {"period": CPU_PERIOD, "quota": int(service["cpus"] * CPU_PERIOD)},
    }


class Container:
    """One running server. Leaving the context kills the server if it still runs."""

    def __init__(
        self, bundle: Path, rootfs: Path, image: dict[str, Any], service: dict[str, Any], port: int
    ) -> None:
        """bundle: a folder for the container's configuration, its log and its volumes."""
        self.id = f"attncache-{uuid.uuid4().hex[:12]}"
        self._bundle = bundle
        subprocess.run(["runc", "spec", "--bundle", str(bundle)], check=True)
        spec = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
        spec["root"] = {"path": str(rootfs), "readonly": service["read_only"]}
        spec["process"] = process_of(image, service, port)
        spec["mounts"] += mounts_of(service, bundle)
        spec["linux"]["resources"] |= limits_of(service)
        spec["linux"]["namespaces"] = [
            space for space in spec["linux"]["namespaces"] if space["type"] != "network"
        ]
        (bundle / "config.json").write_text(json.dumps(spec), encoding="utf-8")
        for text in service["volumes"]:
            volume = bundle / text.split(":")[0]
            volume.mkdir()
            subprocess.run(["chown", image["User"], str(volume)], check=True)

    def __enter__(self) -> Container:
        with (self._bundle / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["runc", "run", "--bundle", str(self._bundle), self.id], stdout=log, stderr=log
            )
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["runc", "delete", "--force", self.id], capture_output=True, check=False)
        self._process.wait(timeout=60)

    @property
    def log(self) -> str:
        return (self._bundle / "log").read_text(encoding="utf-8")

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container as the user of the server."""
        return subprocess.run(
            ["runc", "exec", self.id, *command], capture_output=True, text=True, timeout=120, check=False
        )

    def stop(self, signal: str) -> int:
        """Send the signal to the server, and return its exit status."""
        subprocess.run(["runc", "kill", self.id, signal], check=True)
        return self._process.wait(timeout=60)
