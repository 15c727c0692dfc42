# Sourced by the scripts: make .venv beside the sources if there is none, install what is pinned, once.
# Sets PY to the environment's interpreter. PYTHON=... chooses the interpreter that makes it.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

fail() {
    echo "error: $*" >&2
    exit 2
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python $0"
}

install_torch() {
    local pin
    pin=$(grep '^torch==' constraints.txt)
    if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 || [ "$(uname)" = Darwin ]; then
        pip_install "$pin"
        return
    fi
    # without an NVIDIA device the default wheel would bring gigabytes of CUDA: a wheel that lies ready on this
    # machine comes first, then PyTorch's index of CPU builds
    pip_install --no-index --no-deps "$pin" 2>/dev/null ||
        pip_install --index-url https://download.pytorch.org/whl/cpu "$pin" ||
        fail "no CPU build of $pin could be installed; see pip's message above"
}

pip_install() {
    "$PY" -m pip install -qq --disable-pip-version-check "$@"
}

make_environment() {
    PY=.venv/bin/python
    local stamp=.venv/.installed wanted
    wanted=$(cat pyproject.toml constraints.txt | cksum)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        return
    fi
    echo "environment: installing into .venv (a few minutes and 1.5 GB, once)" >&2
    [ -x "$PY" ] || "$(find_python)" -m venv .venv || fail "cannot create .venv here; check space and permissions"
    echo "environment: 1 of 2, torch" >&2
    install_torch
    echo "environment: 2 of 2, everything else" >&2
    pip_install -c constraints.txt -e '.[dev]' || fail "installation failed; see pip's message above"
    echo "$wanted" >"$stamp"
}

make_environment
