# The two commands: `make serve` starts the server, `make test` checks everything.
# PIP_ARGUMENTS reaches pip, for an index or a folder of wheels: make serve PIP_ARGUMENTS="--find-links wheels"

PYTHON ?= python3
PIP_ARGUMENTS ?=
PIP = .venv/bin/pip --disable-pip-version-check install --quiet --constraint constraints.txt $(PIP_ARGUMENTS)

.PHONY: serve test install clean

serve: install
	.venv/bin/attncache serve

test: .venv/installed-with-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/pytest

install: .venv/installed

# torch comes first and by itself: what is installed already, no later requirement replaces by another build.
.venv/installed: pyproject.toml constraints.txt setup.py $(wildcard attncache_core/native/*.[ch])
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable .
	touch $@

.venv/installed-with-test: .venv/installed
	$(PIP) --editable '.[test]'
	touch $@

clean:
	rm -rf .venv build *.egg-info attncache_core/native/*.so
