"""Builds attncache_core/native: attention.c once for each level of processor that it may run on; sigbus.c.

The compiler is Zig's C compiler, from a package: the same one on every machine, and none has to be installed.
All else about the package stands in pyproject.toml.
"""

import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# A library -> its source, and the processor it is compiled for. attncache_core/native chooses among the
# levels of attention.
LIBRARIES = {
    "x86_64": {
        "attention_avx2": ("attention.c", "x86_64_v3"),
        "attention_avx512": ("attention.c", "x86_64_v4"),
        "attention_avx512_bf16": ("attention.c", "x86_64_v4+avx512bf16"),
        "sigbus": ("sigbus.c", "x86_64"),
    },
    "aarch64": {"attention_neon": ("attention.c", "generic"), "sigbus": ("sigbus.c", "generic")},
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


class BuildLibraries(build_ext):
    """Compiles each extension for its processor: shared libraries, no Python modules."""

    def build_extension(self, extension: Extension) -> None:
        """Called once a library."""
        _, processor = LIBRARIES[platform.machine()][extension.name.rpartition(".")[2]]
        output = Path(self.get_ext_fullpath(extension.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, f"-mcpu={processor}"]
        try:
            subprocess.run([*command, *extension.sources, "-o", str(output)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            # Attention then runs on torch's operators, more slowly, and /info says so; without the guard,
            # records are read into memory instead of mapped.
            print(f"warning: {extension.name} was not compiled: {error}", file=sys.stderr)


libraries = LIBRARIES.get(platform.machine(), {}) if sys.platform == "linux" else {}
setup(
    cmdclass={"build_ext": BuildLibraries},
    ext_modules=[
        Extension(
            f"attncache_core.native.{name}",
            [str(SOURCES / source)],
            optional=True,
            depends=[str(header) for header in sorted(SOURCES.glob("*.h"))],
        )
        for name, (source, _) in libraries.items()
    ],
)
