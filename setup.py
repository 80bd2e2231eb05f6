"""Packaging: metadata, dependencies and where the packages lie. Tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
ENGINE = "megatron/core/distributed/fsdp/src/megatron_fsdp"

EXTRAS = {
    "te": ["transformer-engine[pytorch]"],
    "hf": ["transformers", "safetensors"],
    "tokenizers": ["sentencepiece", "tiktoken"],
    "wandb": ["wandb"],
}
EXTRAS["test"] = ["pytest>=7.4", "hypothesis", "ruff", "setuptools", *EXTRAS["hf"], *EXTRAS["tokenizers"]]


def package_info() -> dict[str, str]:
    """The names of package_info.py, read without importing the engine and so without torch."""
    names: dict[str, str] = {}
    exec((ROOT / ENGINE / "package_info.py").read_text(encoding="utf-8"), names)
    return names


def packages() -> list[str]:
    """The engine under its import name and the training package; megatron.core belongs to another wheel."""
    engine = find_packages(str(ROOT / Path(ENGINE).parent), include=["megatron_fsdp", "megatron_fsdp.*"])
    training = find_packages(str(ROOT / "megatron"), include=["training", "training.*"])
    return engine + [f"megatron.{name}" for name in training]


info = package_info()

setup(
    name="megatron-fsdp",
    version=info["__version__"],
    description=info["__description__"],
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=info["__contact_names__"],
    license=info["__license__"],
    license_files=["LICENSE"],
    keywords=info["__keywords__"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10",
    package_dir={"megatron_fsdp": ENGINE},
    packages=packages(),
    py_modules=["pretrain_gpt"],
    # The list that tells a flag of Megatron-LM from a typing mistake.
    package_data={"megatron.training.config": ["megatron_lm_flags.txt"]},
    install_requires=[
        "torch>=2.11,<2.14",
        # Pinned: the adapter relies on megatron-core's internals.
        "megatron-core==0.16.1",
        "numpy",
        "pyyaml",
        # megatron-core imports these two without declaring them.
        "einops",
        "psutil",
        "rich",
        "tensorboard",
        "matplotlib",
    ],
    extras_require=EXTRAS,
)
