# Sourced: creates .venv once (again when the requirements change) and activates it. Safe beside another one that does
# the same. PASSES_PYTHON picks the interpreter.
_stamp=".venv/inductor_passes.stamp"
_want=$(cat pyproject.toml tools/constraints.txt | sha256sum | cut -d' ' -f1)
_install() {
    # Whoever waited for the lock finds the work done.
    [ "$(cat "$_stamp" 2>/dev/null)" = "$_want" ] && return
    echo "setting up .venv (once) ..." >&2
    "${PASSES_PYTHON:-python3}" -m venv .venv &&
        .venv/bin/python -m pip install --quiet --upgrade pip &&
        .venv/bin/python -m pip install --quiet -c tools/constraints.txt -e '.[test]' &&
        echo "$_want" > "$_stamp"
}
if [ "$(cat "$_stamp" 2>/dev/null)" != "$_want" ]; then
    {
        if command -v flock >/dev/null; then flock 9; fi
        _install
    } 9>.venv.lock || {
        echo "$0: .venv cannot be set up (see above); this folder must be writable, with 2 GB of space and pip's network" >&2
        exit 1
    }
fi
source .venv/bin/activate
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# What a tool compares says for itself whether ours is on, and how it is set. Whether loops are compiled is the machine's.
unset INDUCTOR_PASSES
for _name in "${!INDUCTOR_PASSES_@}"; do
    [ "$_name" = INDUCTOR_PASSES_NATIVE ] || unset "$_name"
done
