# `make serve` starts the server, `make test` runs all checks.
# PIP_ARGUMENTS is passed to pip, for example to use a folder of wheels:
# make serve PIP_ARGUMENTS="--find-links wheels"

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
	.venv/bin/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

install: .venv/installed

# torch is installed first, so that a later requirement does not replace it with another build.
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
