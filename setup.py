"""Packaging of hf_deqnar. Tested versions are pinned in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+?)"', (here / "src/hf_deqnar/__init__.py").read_text(encoding="utf-8")).group(1)

ONNX = ["onnx", "onnxruntime>=1.20", "onnxscript"]

setup(
    name="hf_deqnar",
    version=version,
    description="Deep-equilibrium non-autoregressive translation for Hugging Face Transformers",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    package_dir={"": "src"},
    packages=find_packages("src"),
    package_data={"hf_deqnar": ["py.typed", "box/*.json", "box/*.safetensors", "box/README.md"]},
    python_requires=">=3.10",
    install_requires=["torch>=2.6", "transformers>=5.22,<6", "safetensors", "tokenizers", "numpy", "tqdm"],
    extras_require={
        "train": ["accelerate>=1.1", "datasets", "sacrebleu", "scipy", "pyyaml"],
        "track": ["tensorboard", "trackio"],
        "plot": ["matplotlib"],
        "ctranslate2": ["ctranslate2"],
        "onnx": ONNX,
        "test": ["pytest", "pytest-xdist", "ruff", "import-linter", "torchdeq", *ONNX],
    },
    entry_points={"console_scripts": ["hf-deqnar=hf_deqnar.cli.main:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
