# Sourced: creates .venv once (again when the requirements change) and activates it.
# PASSES_PYTHON picks the interpreter.
_stamp=".venv/inductor_passes.stamp"
_want=$(cat pyproject.toml tools/constraints.txt | sha256sum | cut -d' ' -f1)
if [ "$(cat "$_stamp" 2>/dev/null)" != "$_want" ]; then
    echo "setting up .venv (once) ..." >&2
    "${PASSES_PYTHON:-python3}" -m venv .venv
    .venv/bin/python -m pip install --quiet --upgrade pip
    .venv/bin/python -m pip install --quiet -c tools/constraints.txt -e '.[test]'
    echo "$_want" > "$_stamp"
fi
source .venv/bin/activate
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
