"""Builds attncache_core/native/attention.c, once for each level of processor that it may run on.

The compiler is Zig's C compiler, from a package: the same one on every machine, and none has to be installed.
All else about the package stands in pyproject.toml.
"""

import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# The name of a level -> the processor it is compiled for. attncache_core/native chooses among them.
LEVELS = {
    "x86_64": {
        "avx2": "x86_64_v3",
        "avx512": "x86_64_v4",
        "avx512_bf16": "x86_64_v4+avx512bf16",
    },
    "aarch64": {"neon": "generic"},
}
SOURCES = Path("attncache_core/native")
# Contracted: a multiplication and an addition may be one instruction.
FLAGS = [
    "-std=c11",
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-s",
    "-Wall",
]


class BuildLevels(build_ext):
    """Compiles each extension for the processor in its name: shared libraries, no Python modules."""

    def build_extension(self, extension: Extension) -> None:
        """Called once a level."""
        level = extension.name.rpartition(".attention_")[2]
        output = Path(self.get_ext_fullpath(extension.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        processor = LEVELS[platform.machine()][level]
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, f"-mcpu={processor}"]
        try:
            subprocess.run([*command, *extension.sources, "-o", str(output)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            # Attention then runs on torch's operators, more slowly, and /info says so.
            print(f"warning: {extension.name} was not compiled: {error}", file=sys.stderr)


setup(
    cmdclass={"build_ext": BuildLevels},
    ext_modules=[
        Extension(
            f"attncache_core.native.attention_{level}",
            [str(SOURCES / "attention.c")],
            optional=True,
            depends=[str(header) for header in sorted(SOURCES.glob("*.h"))],
        )
        for level in (LEVELS.get(platform.machine(), {}) if sys.platform == "linux" else {})
    ],
)
