# Shell functions that install packages; scripts/environment, engine, clients and lock source this file.
# uv installs in seconds what takes pip minutes. Where uv cannot be had, pip installs the same locks (constraints/*.txt).
# Pip's own settings choose the index for both. RELAX_INSTALLER=pip uses pip even where there is a uv.

cache=${RELAX_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/relax}
uv_release=0.13.9

# Set `uv` to the machine's own uv, else to a copy in the user's cache, else to nothing, which means pip.
# The argument is an interpreter that has pip.
choose_installer() {
    local pinned=$cache/uv-$uv_release part settings
    uv=
    [ "${RELAX_INSTALLER:-uv}" = uv ] || return 0
    if uv --version >/dev/null 2>&1; then
        uv=uv
    elif [ -x "$pinned/bin/uv" ]; then
        uv=$pinned/bin/uv
    else
        mkdir -p "$cache"
        part=$(mktemp -d "$pinned.XXXXXX")
        if pip_install "$1" --no-deps --target "$part" "uv==$uv_release" 2>/dev/null && "$part/bin/uv" --version >/dev/null 2>&1; then
            mv -T "$part" "$pinned" 2>/dev/null || true  # fails where another script was first
            uv=$pinned/bin/uv
        else
            echo "no uv $uv_release for this machine: pip installs instead, which takes minutes" >&2
        fi
        rm -rf "$part"
    fi
    [ -n "$uv" ] || return 0
    settings=$(uv_settings "$1")
    eval "$settings"
}

# Install into a virtual environment: install_into VENV ARGUMENT..., with arguments that pip and uv share.
install_into() {
    local venv=$1
    shift
    if [ -n "$uv" ]; then
        "$uv" pip install -q ${no_index:-} --python "$venv/bin/python" "$@" >&2
    else
        pip_install "$venv/bin/python" "$@"
    fi
}

pip_install() {
    local python=$1
    shift
    "$python" -m pip install -qq --disable-pip-version-check --no-input --progress-bar off "$@" >&2
}

# Print shell code that gives uv the settings of pip. Variables that are set already keep their values.
uv_settings() {
    "$1" - "$("$1" -m pip --disable-pip-version-check config list)" <<'PYTHON'
import ast, os, shlex, sys

from pip._internal.models.index import PyPI

ranks = {"global": 0, "install": 1, ":env:": 2}  # later sections replace the values of earlier ones
read = []
for line in sys.argv[1].splitlines():
    key, _, value = line.partition("=")
    section, _, name = key.rpartition(".")
    if section in ranks:
        read.append((ranks[section], name, " ".join(ast.literal_eval(value).split())))
pip = {name: value for _, name, value in sorted(read)}

# Of equal versions uv takes the one on the first index in UV_INDEX, so the main index comes first there.
main = os.environ.get("UV_DEFAULT_INDEX") or pip.get("index-url") or PyPI.simple_url
extra = pip.get("extra-index-url")
settings = {
    "UV_DEFAULT_INDEX": pip.get("index-url"),
    "UV_INDEX": extra and f"{main} {extra}",
    "UV_INDEX_STRATEGY": "unsafe-best-match",
    "UV_FIND_LINKS": pip.get("find-links", "").replace(" ", ","),
    "UV_CONSTRAINT": pip.get("constraint"),
    "UV_INSECURE_HOST": pip.get("trusted-host"),
    "UV_HTTP_TIMEOUT": pip.get("timeout") or pip.get("default-timeout"),
    "ALL_PROXY": pip.get("proxy"),
    "SSL_CERT_FILE": pip.get("cert"),
}
for name, value in settings.items():
    if value and name not in os.environ:
        print(f"export {name}={shlex.quote(value)}")
if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
    print("no_index=--no-index")
PYTHON
}
