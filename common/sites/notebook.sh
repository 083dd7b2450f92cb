# Notebooks of Kaggle and Colab: SITE=notebook (docs/KAGGLE.md). Their Python has PyTorch.
# Do not run `make venv` there: it fetches 6 GB and another CUDA.
PYTHON=(python)
