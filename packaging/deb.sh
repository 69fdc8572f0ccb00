#!/bin/sh
# Builds the Debian package of daemon and command line.
#
#     packaging/deb.sh [--targets LIST | --without-kernels | --binaries DIR] [--out DIR]
#
# Builds both programs first (cargo build --release), with kernels for AMD cards compiled ahead for
# the targets of LIST: names separated by commas, "all", or "package", which is the default. That
# needs clang 22 or newer with lld, xz, and some 90 seconds of one core a target; with
# ROCMFORGE_AOT_CACHE=DIR objects are kept there for the next time. With --binaries the programs are
# those there. Needs dpkg-deb and perl; prints the path of the package. Beside it lies
# rocmforged-symbols with the names for backtraces, where binutils strips the programs. COMPRESSION
# is dpkg-deb's -Z (xz). DEBFULLNAME and DEBEMAIL name who maintains the package, as for Debian's
# tools; whoever hands packages to others sets them. The same commit and compilers give the same
# packages.
set -eu

cd "$(dirname "$0")/.."
usage() {
    echo "usage: packaging/deb.sh [--targets LIST | --without-kernels | --binaries DIR] [--out DIR]" >&2
    exit 2
}
binaries= targets= out=target/debian choices=0
while [ $# -gt 0 ]; do
    case "$1" in
        --without-kernels) targets=none choices=$((choices + 1)); shift; continue ;;
        --targets | --binaries | --out) [ -n "${2:-}" ] || usage ;;
        *) usage ;;
    esac
    case "$1" in
        --targets) targets=$2 choices=$((choices + 1)) ;;
        --binaries) binaries=$2 choices=$((choices + 1)) ;;
        --out) out=$2 ;;
    esac
    shift 2
done
[ $choices -le 1 ] || usage
command -v dpkg-deb > /dev/null || { echo "deb.sh: dpkg-deb is missing; install dpkg" >&2; exit 1; }
if [ -z "$binaries" ]; then
    ROCMFORGE_AOT_TARGETS=${targets:-package}
    [ "$targets" != none ] || ROCMFORGE_AOT_TARGETS=
    export ROCMFORGE_AOT_TARGETS
    if ! cargo build --locked --release -p rocmforged -p rocmforgectl >&2; then
        [ "$targets" = none ] || echo "deb.sh: not built. If it is the AMD kernels: install clang-22," \
            "lld-22 and xz-utils, or use --without-kernels (the daemon then needs hiprtc)" >&2
        exit 1
    fi
    binaries=${CARGO_TARGET_DIR:-target}/release
fi
for program in rocmforged rocmforgectl; do
    [ -x "$binaries/$program" ] || { echo "deb.sh: there is no $binaries/$program" >&2; exit 1; }
done

maintainer="${DEBFULLNAME:-The rocmforged authors} <${DEBEMAIL:-rocmforged@users.noreply.github.com}>"
# As sed takes it for a replacement.
maintainer_text=$(printf '%s' "$maintainer" | sed 's/[&/\\]/\\&/g')
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
arch=$(dpkg-deb --version > /dev/null && dpkg --print-architecture)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2> /dev/null || date +%s)}
export SOURCE_DATE_EPOCH
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
umask 022
root=$stage/root
symbols=$stage/symbols
mkdir -p "$root" "$symbols" "$out"
# mktemp's own mode would be the mode of / in the package.
chmod 0755 "$root" "$symbols"

# KiB below a directory, by the sizes of its files, as dpkg-gencontrol counts them. du counts
# blocks, of which a file has one more once a file system has written it in many pieces.
size_of() { # DIRECTORY
    find "$1" -printf '%y %s\n' |
        awk '{ n += ($1 == "f" || $1 == "l") ? int(($2 + 1023) / 1024) : 1 } END { print n }'
}
put() { # MODE FILE TARGET
    mkdir -p "$root/$(dirname "$3")"
    install -m "$1" "$2" "$root/$3"
}
packed() { # FILE TARGET
    mkdir -p "$root/$(dirname "$2")"
    gzip -9nc "$1" > "$root/$2"
    chmod 0644 "$root/$2"
}

# Strips a program. The names of functions, for backtraces, go into the package of symbols, where
# programs find them by the build's number.
split_names() { # FILE
    number=$(readelf --notes "$root/$1" | sed -n 's/^ *Build ID: //p')
    if [ -n "$number" ]; then
        rest=${number#??}
        names=$symbols/usr/lib/debug/.build-id/${number%"$rest"}/$rest.debug
        mkdir -p "$(dirname "$names")"
        objcopy --only-keep-debug "$root/$1" "$names"
        chmod 0644 "$names"
    fi
    objcopy --strip-all --remove-section=.comment "$root/$1"
}

for program in rocmforged rocmforgectl; do
    put 0755 "$binaries/$program" "usr/bin/$program"
    if command -v objcopy > /dev/null; then split_names "usr/bin/$program"; fi
done
put 0644 systemd/rocmforged.service usr/lib/systemd/system/rocmforged.service
put 0644 systemd/rocmforged.socket usr/lib/systemd/system/rocmforged.socket
put 0644 systemd/user/rocmforged.service usr/lib/systemd/user/rocmforged.service
put 0644 systemd/sysusers.d/rocmforged.conf usr/lib/sysusers.d/rocmforged.conf
put 0644 systemd/tmpfiles.d/rocmforged.conf usr/lib/tmpfiles.d/rocmforged.conf
put 0644 systemd/rocmforged.toml etc/rocmforged/config.toml
mkdir -p "$root/etc/rocmforged/conf.d"

made=$stage/made
mkdir -p "$made/man" "$made/completions"
for program in rocmforged rocmforgectl; do
    "$binaries/$program" generated man "$made/man"
    "$binaries/$program" generated completions "$made/completions"
done
for page in "$made"/man/*; do
    name=$(basename "$page")
    packed "$page" "usr/share/man/man${name##*.}/$name.gz"
done
for program in rocmforged rocmforgectl; do
    put 0644 "$made/completions/$program.bash" "usr/share/bash-completion/completions/$program"
    put 0644 "$made/completions/_$program" "usr/share/zsh/vendor-completions/_$program"
    put 0644 "$made/completions/$program.fish" "usr/share/fish/vendor_completions.d/$program.fish"
done

doc=usr/share/doc/rocmforged
put 0644 packaging/debian/copyright "$doc/copyright"
# What is new is in CHANGELOG.md; this is the form that Debian's tools read.
{
    printf 'rocmforged (%s) unstable; urgency=medium\n\n' "$version"
    printf '  * CHANGELOG.md in this directory says what is new.\n\n'
    printf ' -- %s  %s\n' "$maintainer" "$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")"
} > "$made/changelog"
packed "$made/changelog" "$doc/changelog.gz"
put 0644 packaging/debian/lintian-overrides usr/share/lintian/overrides/rocmforged
put 0644 systemd/network.conf "$doc/examples/network.conf"
# Pages, and what they speak of, lie as they do in the sources, so that their links lead there.
pages="README.md CHANGELOG.md docs packaging/kubernetes packaging/monitoring packaging/scale-out"
{ git ls-files $pages 2> /dev/null || find $pages -type f; } |
    grep -v '\.test\.' | while read -r page; do
    put 0644 "$page" "$doc/$page"
done
# Links to what only the sources have become plain words.
find "$root/$doc" -type f -name '*.md' | while read -r page; do
    (cd "$(dirname "$page")" && perl -0pi -e \
        's{(!?\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(([^)#\s:]+)(?:#[^)\s]*)?\))}{-e $3 ? $1 : $2}ge' "$page")
    chmod 0644 "$page"
done

# The newest symbols that the programs ask of the C library.
glibc=$(cat "$root/usr/bin/rocmforged" "$root/usr/bin/rocmforgectl" \
    | grep -ao 'GLIBC_[0-9][0-9.]*' | sed 's/GLIBC_//' | sort -uV | tail -n 1)
size=$(size_of "$root")
mkdir "$root/DEBIAN"
sed -e "s/@VERSION@/$version/" -e "s/@ARCH@/$arch/" -e "s/@GLIBC@/${glibc:-2.28}/" \
    -e "s/@SIZE@/$size/" -e "s/@MAINTAINER@/$maintainer_text/" packaging/debian/control.in > "$root/DEBIAN/control"
printf '/etc/rocmforged/config.toml\n' > "$root/DEBIAN/conffiles"
for script in postinst prerm postrm; do
    install -m 0755 "packaging/debian/$script" "$root/DEBIAN/$script"
done
(cd "$root" && find usr etc -type f -exec md5sum {} + | sort -k 2) > "$root/DEBIAN/md5sums"
chmod 0644 "$root/DEBIAN/control" "$root/DEBIAN/conffiles" "$root/DEBIAN/md5sums"

built() { # ROOT NAME
    package=$out/$2_${version}_$arch.deb
    dpkg-deb --root-owner-group "-Z${COMPRESSION:-xz}" --build "$1" "$package" > /dev/null
}
if [ -d "$symbols/usr" ]; then
    mkdir "$symbols/DEBIAN" && mkdir -p "$symbols/usr/share/doc"
    ln -s rocmforged "$symbols/usr/share/doc/rocmforged-symbols"
    overrides=usr/share/lintian/overrides
    mkdir -p "$symbols/$overrides"
    install -m 0644 packaging/debian/lintian-overrides-symbols "$symbols/$overrides/rocmforged-symbols"
    size=$(size_of "$symbols/usr")
    sed -e "s/@VERSION@/$version/" -e "s/@ARCH@/$arch/" -e "s/@SIZE@/$size/" \
        -e "s/@MAINTAINER@/$maintainer_text/" packaging/debian/symbols.in > "$symbols/DEBIAN/control"
    (cd "$symbols" && find usr -type f -exec md5sum {} + | sort -k 2) > "$symbols/DEBIAN/md5sums"
    chmod 0644 "$symbols/DEBIAN/control" "$symbols/DEBIAN/md5sums"
    built "$symbols" rocmforged-symbols
fi
built "$root" rocmforged
echo "$package"
