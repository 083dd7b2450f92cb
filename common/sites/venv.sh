# The virtual environment that `make venv` made; without it, the Python that is found.
if [[ -d $common/../.venv ]]; then
    source "$common/../.venv/bin/activate"
fi
