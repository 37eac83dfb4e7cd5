# `make serve` starts the server, `make test` runs all checks.
# PIP_ARGUMENTS is passed to pip, for example to use a folder of wheels:
# make serve PIP_ARGUMENTS="--find-links wheels"

PYTHON ?= python3
PIP_ARGUMENTS ?=
PIP = .venv/bin/pip --disable-pip-version-check install --constraint constraints.txt $(PIP_ARGUMENTS)
LOCK = --quiet --generate-hashes --no-annotate --custom-compile-command "make lock" --python-version 3.11 \
	--constraint constraints.txt --only-binary :all: $(PIP_ARGUMENTS)

.PHONY: serve quick test versions wheels fuzz kills cluster soak figures sanitize arm install image image-test lock clean

serve: install
	.venv/bin/attncache serve

test: .venv/installed-with-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# Within a minute: the laws on two families, keys and values, a server with a small model.
QUICK = tests/test_architecture.py tests/models/test_families.py tests/reuse/kv/test_continuation.py \
	tests/reuse/kv/test_transfer.py tests/service/test_embed.py tests/service/test_classify.py tests/service/test_batcher.py
quick: .venv/installed-with-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy & types=$$!; .venv/bin/pytest --hypothesis-profile=quick \
		-k 'not test_families or modernbert or llama-one-key' $(QUICK) && wait $$types

install: .venv/installed

# Tests with the oldest versions of all dependencies, and with the newest uvicorn, whose private names are used.
versions: .venv/installed-with-test
	$(PIP) --quiet uv
	.venv/bin/python tests/versions.py $(PIP_ARGUMENTS)

# Wheels for both platforms, in dist/, and their tests. The libraries in them need no certain version of Python.
wheels: .venv/installed-with-test
	rm -rf build/manylinux_* dist
	for machine in x86_64 aarch64; do \
		ATTNCACHE_WHEEL=manylinux_2_28_$$machine $(PIP:install=wheel) --no-deps --wheel-dir dist . || exit 1; \
	done
	.venv/bin/pytest -m wheels

# Random requests and random bytes by the thousand, other ones in every run.
fuzz: .venv/installed-with-test
	.venv/bin/pytest --hypothesis-profile=fuzz --timeout 0 tests/service/test_documented_api.py \
		tests/service/test_fuzzed_bytes.py

# Renewals of a database that are killed a thousand times, servers that change the generation 200 times,
# conversations while the store that machines share is killed and frozen 40 times, and 100 kills of the actors,
# nodes and drivers of a Ray cluster.
kills: .venv/installed-with-test
	ATTNCACHE_KILLS=1000 ATTNCACHE_SWAPS=200 ATTNCACHE_OUTAGES=40 ATTNCACHE_RAY_KILLS=100 \
		.venv/bin/pytest --timeout 0 -s tests/reuse/test_generations.py tests/service/test_renewed_database.py \
		tests/service/test_shared_between_machines.py tests/service/test_sharded.py

# Servers behind Envoy that are killed, frozen, drained and added under load, 20 times each.
cluster: .venv/installed-with-test
	CLUSTER_EVENTS=20 .venv/bin/pytest --timeout 0 -s tests/service/test_cluster.py

# Full load and damaged files for ten minutes, then a table and build/soak.png.
soak: .venv/installed-with-test
	mkdir -p build
	.venv/bin/python -m benchmarks soak --plot build/soak.png

# Measures the tables of docs/ for hours, and writes them into the pages. A run that was stopped continues.
# FIGURES="--data FOLDER --models FOLDER" also measures what needs data sets and trained models.
figures: .venv/installed-with-test
	.venv/bin/python -m benchmarks figures $(FIGURES)

# The C code under AddressSanitizer and UndefinedBehaviorSanitizer. Needs Clang 19 or newer as $(CLANG).
CLANG ?= clang
sanitize: .venv/installed-with-test
	CC=$(CLANG) .venv/bin/python tests/native/sanitize.py

# The kernel's tests on an emulated aarch64 processor, with libraries that are compiled here. Needs Debian's packages
# qemu-user and mmdebstrap. The first run downloads 0.3 GB into build/arm; `make clean` removes it.
arm: .venv/installed-with-test
	$(PIP) uv 'ziglang<0.18'
	.venv/bin/python tests/native/arm.py

# PLATFORM=linux/arm64 or linux/amd64: of the image; by default of this machine.
image:
	PIP_ARGUMENTS="$(PIP_ARGUMENTS)" docker/build.sh $(if $(PLATFORM),--platform $(PLATFORM))

# Builds the image with buildah and runs it, as root, in about ten minutes. Needs Debian's packages buildah,
# debootstrap and runc; without them, the tests are skipped.
image-test: .venv/installed-with-test
	.venv/bin/pytest -m image -rs

# Writes the versions and hashes that the image installs on each platform; constraints.txt chooses the versions.
# The build tools are the same on both: their hashes are those of all files of a version.
lock: .venv/installed
	$(PIP) --quiet uv
	for machine in x86_64 aarch64; do \
		.venv/bin/uv pip compile $(LOCK) --python-platform $$machine-manylinux_2_28 \
			--output-file docker/requirements.$$machine.lock --extra cluster --extra otel pyproject.toml || exit 1; \
	done
	.venv/bin/uv pip compile $(LOCK) --python-platform x86_64-manylinux_2_28 \
		--output-file docker/build.lock --group image

# torch is installed first, so that a later requirement does not replace it with another build.
.venv/installed: pyproject.toml constraints.txt setup.py $(wildcard attncache_core/native/*.[ch])
	@echo "Installing into .venv. The first time, pip downloads torch and some 80 packages, and compiles the C code."
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

.venv/installed-with-test: .venv/installed
	$(PIP) --editable '.[test]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info attncache_core/native/*.so
