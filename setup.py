"""Compile the C libraries of attncache_core/native: attention.c once per processor level, and sigbus.c.

The compiler is Zig's C compiler, which pip installs from a package for the build. Every machine thus uses the
same compiler, and no system compiler is needed. pyproject.toml has all other settings of the package.

The variable ATTNCACHE_WHEEL, such as manylinux_2_28_aarch64, names the platform of a wheel (`make wheels`).
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# Machine -> library -> source file and target processor. At run time, attncache_core/native chooses among the
# levels of the attention library.
LIBRARIES = {
    "x86_64": {
        "attention_avx2": ("attention.c", "x86_64_v3"),
        "attention_avx2_vnni": ("attention.c", "x86_64_v3+avxvnni"),
        "attention_avx512": ("attention.c", "x86_64_v4"),
        "attention_avx512_vnni": ("attention.c", "x86_64_v4+avx512vnni"),
        "attention_avx512_bf16": ("attention.c", "x86_64_v4+avx512vnni+avx512bf16"),
        "attention_avx512_amx": (
            "attention.c",
            "x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_bf16+amx_int8",
        ),
        "sigbus": ("sigbus.c", "x86_64"),
    },
    "aarch64": {"attention_neon": ("attention.c", "generic"), "sigbus": ("sigbus.c", "generic")},
}
WHEEL = os.environ.get("ATTNCACHE_WHEEL", "")
MACHINE = platform.machine()
TARGET: list[str] = []
if WHEEL:
    # The libraries of a wheel run with every glibc from the version in the platform's name on.
    _, major, minor, MACHINE = WHEEL.split("_", 3)
    TARGET = ["-target", f"{MACHINE}-linux-gnu.{major}.{minor}"]
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

    def get_ext_filename(self, fullname: str) -> str:
        """Return the path of a library. ctypes loads it, so its name has no version of Python."""
        return f"{fullname.replace('.', os.sep)}.so"

    def build_extension(self, extension: Extension) -> None:
        """Compile one library.

        A failure is a warning, because the package works without the library. It ends the build of a wheel
        for other machines.
        """
        _, processor = LIBRARIES[MACHINE][extension.name.rpartition(".")[2]]
        output = Path(self.get_ext_fullpath(extension.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, *TARGET, f"-mcpu={processor}"]
        try:
            subprocess.run([*command, *extension.sources, "-o", str(output)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            if WHEEL:
                raise
            # Without the kernel, attention runs on torch's operators, which is slower, and /info reports it.
            # Without sigbus.c, records are read into memory instead of mapped.
            print(f"warning: {extension.name} was not compiled: {error}", file=sys.stderr)


if sys.platform == "win32":
    sys.exit("AttnCache does not run on Windows: install it on Linux, for example in WSL")


class LinuxWheel(bdist_wheel):
    """A wheel for every version of Python on one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, of its binary interface and of the platform."""
        return "py3", "none", WHEEL or super().get_tag()[2]


libraries = LIBRARIES.get(MACHINE, {}) if WHEEL or sys.platform == "linux" else {}
setup(
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": LinuxWheel},
    # Each platform has a folder, because a wheel takes all that lies in the folder of its build.
    options={"build": {"build_base": f"build/{WHEEL}"}} if WHEEL else {},
    ext_modules=[
        Extension(
            f"attncache_core.native.{name}",
            [str(SOURCES / source)],
            optional=not WHEEL,
            depends=[str(header) for header in sorted(SOURCES.glob("*.h"))],
        )
        for name, (source, _) in libraries.items()
    ],
)
