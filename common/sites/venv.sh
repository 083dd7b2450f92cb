# The virtual environment that `make venv` made (for TensorFlow `make venv-tensorflow`);
# without it, the Python that is on the PATH.
venv=$common/../.venv
[[ $framework == torch ]] || venv=$venv-$framework
if [[ -f $venv/bin/activate ]]; then
    source "$venv/bin/activate"
fi
