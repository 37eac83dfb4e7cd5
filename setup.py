"""Compile the C libraries of attncache_core/native: attention.c once per processor level, and sigbus.c.

The compiler is Zig's C compiler, which pip installs from a package for the build. Every machine thus uses the
same compiler, and no system compiler is needed. pyproject.toml has all other settings of the package.
"""

import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Machine -> library -> source file and target processor. At run time, attncache_core/native chooses among the
# levels of the attention library.
LIBRARIES = {
    "x86_64": {
        "attention_avx2": ("attention.c", "x86_64_v3"),
        "attention_avx512": ("attention.c", "x86_64_v4"),
        "attention_avx512_vnni": ("attention.c", "x86_64_v4+avx512vnni"),
        "attention_avx512_bf16": ("attention.c", "x86_64_v4+avx512vnni+avx512bf16"),
        "sigbus": ("sigbus.c", "x86_64"),
    },
    "aarch64": {"attention_neon": ("attention.c", "generic"), "sigbus": ("sigbus.c", "generic")},
}
SOURCES = Path("attncache_core/native")
# -ffp-contract=fast lets a multiplication and an addition become one instruction.
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
    """A build step that compiles each extension to a shared library for its processor."""

    def build_extension(self, extension: Extension) -> None:
        """Compile one library. A failure is reported as a warning, because the package works without it."""
        _, processor = LIBRARIES[platform.machine()][extension.name.rpartition(".")[2]]
        output = Path(self.get_ext_fullpath(extension.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, f"-mcpu={processor}"]
        try:
            subprocess.run([*command, *extension.sources, "-o", str(output)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            # Without the kernel, attention runs on torch's operators, which is slower, and /info reports it.
            # Without sigbus.c, records are read into memory instead of mapped.
            print(f"warning: {extension.name} was not compiled: {error}", file=sys.stderr)


if sys.platform == "win32":
    sys.exit("AttnCache does not run on Windows: install it on Linux, for example in WSL")

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
