#!/usr/bin/env bash
# Runs the two commands of README.md as if on a machine that has never seen the project: a clone of the last commit in a
# folder with a space in its name, an empty HOME, an empty TMPDIR with a long path, no folder of Ray, a locale that is
# neither English nor UTF-8, and another time zone. Keeps only PATH and the variables that pip needs to reach its index.
# TMPDIR itself has no space: torch.compile passes paths below it to the C++ compiler without quotes.
#
#   tools/fresh_machine.sh [FOLDER]   FOLDER (default: /tmp) holds the clone, about 6 GiB; removed if everything passes
#   PYTEST=--random-order tools/fresh_machine.sh   passes flags to pytest
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fresh=$(mktemp -d "${1:-/tmp}/fresh machine XXXXXX")
clone="$fresh/open rlhf"
temporary=$(mktemp -d "${1:-/tmp}/a-temporary-folder-with-a-path-as-long-as-some-clusters-have-it-XXXXXX")
language=de_DE.ISO-8859-1

if [[ -e /tmp/ray ]]; then
    echo "/tmp/ray exists, so this machine is not fresh. Try: ray stop && rm -r /tmp/ray" >&2
    exit 1
fi

git clone --quiet "$root" "$clone"
mkdir "$fresh/home" "$fresh/locales"
localedef -i de_DE -f ISO-8859-1 "$fresh/locales/$language"

kept=()
while IFS='=' read -r name value; do
    case $name in
        PATH | PYTHON | PYTEST | WORKERS | LOCK | PIP_* | UV_* | SSL_* | REQUESTS_CA_BUNDLE | *_proxy | *_PROXY) kept+=("$name=$value") ;;
    esac
done < <(env)
for file in "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf"; do
    if [[ -z ${PIP_CONFIG_FILE:-} && -f $file ]]; then
        kept+=("PIP_CONFIG_FILE=$file")
    fi
done

for target in quickstart test; do
    echo "== make $target"
    started=$SECONDS
    (
        cd "$clone"
        env -i "${kept[@]}" HOME="$fresh/home" TMPDIR="$temporary" TZ=Asia/Kolkata \
            LC_ALL="$language" LOCPATH="$fresh/locales" make "$target"
    )
    echo "== make $target: $((SECONDS - started)) seconds"
done

# PyTorch, vLLM, torchrun and wandb leave their own files in TMPDIR; these would be ours.
left=$(find /tmp "$temporary" -maxdepth 1 -newer "$fresh/locales" \
    \( -name ray -o -name 'openrlhf-*' -o -name 'examples-*' -o -name 'or????????' \))
if [[ -n $left ]]; then
    printf 'the commands left something behind:\n%s\n' "$left" >&2
    exit 1
fi
rm -rf "$fresh" "$temporary"
