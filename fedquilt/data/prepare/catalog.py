"""Data sets that can be prepared: their published files, and the functions that make arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedquilt.data.prepare.cifar import cifar10, cifar100
from fedquilt.data.prepare.digits import digits5, split_counts
from fedquilt.data.prepare.download import Fetched, Published, Watch
from fedquilt.data.prepare.mnist import mnist_writers
from fedquilt.data.prepare.syn import syn

MB = 10**6


@dataclass(frozen=True)
class Recipe:
    """Options of data sets whose images are drawn at random or synthesised."""

    # Training images per domain of digits5 and syn. Test images: half as many.
    per_domain: int = 2000
    seed: int = 0  # Random seed of the choice of images, and of synthesised ones.
    fonts: Path | None = None  # Folder of fonts for SYN. None: those of matplotlib and Pillow.


Make = Callable[[Mapping[str, Fetched], Recipe, Watch], dict[str, np.ndarray]]


@dataclass(frozen=True)
class DataSet:
    """A data set that `fedquilt data prepare` writes as an .npz file."""

    name: str  # Name of the data set, and of its file without .npz.
    title: str  # Description in one line.
    source: str  # Publishers and their addresses.
    terms: str  # Terms of use as the publishers state them.
    files: tuple[Published, ...]  # Files that are downloaded for it.
    make: Make  # Function from the files to the arrays that docs/data.md describes.


def _published(
    name: str, host: str, md5: str, max_bytes: int, max_unpacked: int, mirror: str = ""
) -> Published:
    """Return the description of a file whose address is `host` followed by its name.

    Nothing is downloaded.

    Args:
        name: Name of the file.
        host: Beginning of its address.
        md5: Published checksum. Empty: none is known.
        max_bytes: Size above which the file is refused.
        max_unpacked: Largest number of bytes that it may unpack to.
        mirror: Beginning of its second address. Empty: there is none.
    """
    hosts = (host, mirror) if mirror else (host,)
    return Published(
        name, tuple(f"{address}{name}" for address in hosts), max_bytes, max_unpacked, md5
    )


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_CIFAR10 = _published(
    "cifar-10-binary.tar.gz", _TORONTO, "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171, 200 * MB
)
_CIFAR100 = _published(
    "cifar-100-binary.tar.gz", _TORONTO, "03b5dce01913d631647c71ecec9e9cb8", 168_513_733, 200 * MB
)

_MNIST_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_MNIST_HOME = "http://yann.lecun.com/exdb/mnist/"
_MNIST = tuple(
    _published(name, _MNIST_MIRROR, md5, max_bytes, max_unpacked, _MNIST_HOME)
    for name, md5, max_bytes, max_unpacked in (
        ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422, 48 * MB),
        ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", 28_881, MB),
        ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3", 1_648_877, 8 * MB),
        ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", 4_542, MB),
    )
)
_QMNIST_HOME = "https://raw.githubusercontent.com/facebookresearch/qmnist/master/"
_QMNIST = (
    _published(
        "qmnist-train-labels-idx2-int.gz",
        _QMNIST_HOME,
        "0058f8dd561b90ffdd0f734c6a30e5e4",
        4 * MB,
        4 * MB,
    ),
    _published(
        "qmnist-test-labels-idx2-int.gz",
        _QMNIST_HOME,
        "5b5b05890a5e13444e108efe57b788aa",
        4 * MB,
        4 * MB,
    ),
)

_SVHN_HOME = "http://ufldl.stanford.edu/housenumbers/"
_SVHN = (
    _published(
        "train_32x32.mat", _SVHN_HOME, "e26dedcc434d2e4c54c9b2d4a06d8373", 182_040_794, 240 * MB
    ),
    _published(
        "test_32x32.mat", _SVHN_HOME, "eb5a983be6a315427106f1b164d9cef3", 64_275_384, 90 * MB
    ),
)
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/"
_USPS = (
    _published("usps.bz2", _LIBSVM, "ec16c51db3855ca6c91edd34d0e9b197", 20 * MB, 60 * MB),
    _published("usps.t.bz2", _LIBSVM, "8ea070ee2aca1ac39742fdd1ef5ed118", 10 * MB, 30 * MB),
)
_MNISTM = Published(
    "mnist_m.tar.gz",
    ("https://cornell.box.com/shared/static/jado7quprg6hzzdubvwzh9umr75damwi",),
    max_bytes=400 * MB,
    max_unpacked=1_000 * MB,
    md5="859df31c91afe82e80e5012ba928f279",
)

_MNIST_TERMS = "MNIST: CC BY-SA 3.0"
_SYN_TERMS = "synthesised here; the fonts are free"
DATA_SETS: dict[str, DataSet] = {
    one.name: one
    for one in (
        DataSet(
            "cifar10",
            "CIFAR-10: 60,000 colour images of 32 × 32 pixels, 10 classes",
            "Alex Krizhevsky, https://www.cs.toronto.edu/~kriz/cifar.html",
            "no licence is stated; cite Krizhevsky (2009)",
            (_CIFAR10,),
            lambda files, recipe, watch: cifar10(files[_CIFAR10.name]),
        ),
        DataSet(
            "cifar100",
            "CIFAR-100: 60,000 colour images of 32 × 32 pixels, 100 classes",
            "Alex Krizhevsky, https://www.cs.toronto.edu/~kriz/cifar.html",
            "no licence is stated; cite Krizhevsky (2009)",
            (_CIFAR100,),
            lambda files, recipe, watch: cifar100(files[_CIFAR100.name]),
        ),
        DataSet(
            "mnist_writers",
            "MNIST with the writer of every digit as its client",
            "LeCun, Cortes and Burges, http://yann.lecun.com/exdb/mnist/; writers from QMNIST by "
            "Yadav and Bottou, https://github.com/facebookresearch/qmnist",
            f"{_MNIST_TERMS}; QMNIST: BSD-style licence",
            (*_MNIST, *_QMNIST),
            lambda files, recipe, watch: mnist_writers(files),
        ),
        DataSet(
            "digits5",
            "Digits-Five: MNIST, SVHN, USPS, SYN-like digits and MNIST-M, 28 × 28 pixels, balanced "
            "by class",
            "MNIST, http://yann.lecun.com/exdb/mnist/; SVHN, "
            "http://ufldl.stanford.edu/housenumbers/; USPS, "
            f"{_LIBSVM.removesuffix('multiclass/')}multiclass.html#usps; MNIST-M by Ganin and "
            "Lempitsky, http://yaroslav.ganin.net/; SYN-like digits, drawn here and not the "
            "published SYN",
            f"{_MNIST_TERMS}; SVHN: non-commercial use only; USPS and MNIST-M: no licence is "
            f"stated; SYN-like digits: {_SYN_TERMS}",
            (*_MNIST, *_SVHN, *_USPS, _MNISTM),
            lambda files, recipe, watch: digits5(
                files, recipe.per_domain, recipe.seed, recipe.fonts, watch
            ),
        ),
        DataSet(
            "syn",
            "SYN-like digits: synthetic house numbers after Ganin and Lempitsky (2015), not the "
            "published SYN",
            "drawn here from fonts, without a download",
            _SYN_TERMS,
            (),
            lambda files, recipe, watch: syn(
                split_counts(recipe.per_domain), recipe.seed, recipe.fonts, watch
            ),
        ),
    )
}
