# Sourced by the other scripts: makes or refreshes the virtual environment .venv of this checkout.
#
# make_environment does nothing when pyproject.toml and constraints.txt are as they were at its last
# success, which it remembers as a hash in .venv/installed.
# Invariant: nothing outside .venv is changed, and no package index is named: pip's own settings hold.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ENVIRONMENT="$ROOT/.venv"
PYTHON_CANDIDATES=(python3.12 python3 python python3.13 python3.14)

export PIP_DISABLE_PIP_VERSION_CHECK=1

# Succeeds if $1 is a Python that is new enough and can make environments with pip in them.
is_usable_python() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Prints the path of a usable Python, or nothing.
find_python() {
    local candidate
    for candidate in "${PYTHON_CANDIDATES[@]}"; do
        if is_usable_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    if command -v pyenv >/dev/null; then
        for candidate in "$(pyenv root)"/versions/3.1[2-9]*/bin/python; do
            if is_usable_python "$candidate"; then
                echo "$candidate"
                return
            fi
        done
    fi
}

# Makes an empty environment in $1, with pip in it.
create_environment() {
    local python
    python="$(find_python)"
    if [[ -n "$python" ]]; then
        "$python" -m venv --clear "$1"
    elif command -v uv >/dev/null; then
        uv venv --quiet --seed --clear --python 3.12 "$1"
    else
        cat >&2 <<'MESSAGE'
No Python 3.12 or newer that can make virtual environments was found (tried: python3.12, python3, python,
python3.13, python3.14, pyenv's versions, uv). Any one of these helps; then run the command again:
  Debian, Ubuntu   apt-get install python3.12 python3.12-venv
  Fedora           dnf install python3.12
  pyenv            pyenv install 3.12
  uv               install uv; it fetches a Python by itself
MESSAGE
        return 1
    fi
}

# Succeeds if the environment $1 has a working pip and was made at this very place (its scripts hold their path).
is_whole() {
    "$1/bin/python" -m pip --version >/dev/null 2>&1 && grep -q "$1/" "$1/bin/pip"
}

# Prints the hash of everything that decides what is installed.
wanted_state() {
    (cd "$ROOT" && cat pyproject.toml constraints.txt && pwd) | cksum
}

# Makes .venv, or brings it up to date. A half-made one is completed.
make_environment() {
    if [[ "$(cat "$ENVIRONMENT/installed" 2>/dev/null)" == "$(wanted_state)" ]]; then
        return
    fi
    if ! is_whole "$ENVIRONMENT"; then
        echo "Making the environment $ENVIRONMENT" >&2
        create_environment "$ENVIRONMENT"
    fi
    echo "Installing jaxllm and its tested dependencies (constraints.txt) into $ENVIRONMENT" >&2
    (cd "$ROOT" && "$ENVIRONMENT/bin/python" -m pip install -qq -c constraints.txt -e '.[test]')
    wanted_state >"$ENVIRONMENT/installed"
}
