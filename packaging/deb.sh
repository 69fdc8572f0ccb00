#!/bin/sh
# Builds the Debian package of daemon and command line.
#
#     packaging/deb.sh [--targets LIST | --without-kernels | --binaries DIR] [--out DIR]
#
# Builds both programs first (cargo build --release), with kernels for AMD cards compiled ahead for
# the targets of LIST: names separated by commas, "all", or "package", which is the default. That
# needs clang 22 or newer with lld, xz, and some 90 seconds of one core a target; with
# ROCMFORGE_AOT_CACHE=DIR objects are kept there for the next time. With --binaries the programs are
# packed as they are. Needs dpkg-deb; prints the path of the package. COMPRESSION is dpkg-deb's -Z
# (xz). The same commit and compilers give the same package.
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

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"$/\1/p' Cargo.toml)
arch=$(dpkg-deb --version > /dev/null && dpkg --print-architecture)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2> /dev/null || date +%s)}
export SOURCE_DATE_EPOCH
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
umask 022
root=$stage/root
mkdir -p "$root" "$out"
# mktemp's own mode would be the mode of / in the package.
chmod 0755 "$root"

put() { # MODE FILE TARGET
    mkdir -p "$root/$(dirname "$3")"
    install -m "$1" "$2" "$root/$3"
}
packed() { # FILE TARGET
    mkdir -p "$root/$(dirname "$2")"
    gzip -9nc "$1" > "$root/$2"
    chmod 0644 "$root/$2"
}

for program in rocmforged rocmforgectl; do
    put 0755 "$binaries/$program" "usr/bin/$program"
    # The names of functions stay, for backtraces.
    if command -v strip > /dev/null; then strip --strip-debug "$root/usr/bin/$program"; fi
done
put 0644 systemd/rocmforged.service usr/lib/systemd/system/rocmforged.service
put 0644 systemd/rocmforged.socket usr/lib/systemd/system/rocmforged.socket
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
put 0644 README.md "$doc/README.md"
put 0644 docs/first-contact.md "$doc/first-contact.md"
packed CHANGELOG.md "$doc/changelog.gz"

# The newest symbols that the programs ask of the C library.
glibc=$(cat "$root/usr/bin/rocmforged" "$root/usr/bin/rocmforgectl" \
    | grep -ao 'GLIBC_[0-9][0-9.]*' | sed 's/GLIBC_//' | sort -uV | tail -n 1)
size=$(du -k -s "$root" | cut -f 1)
mkdir "$root/DEBIAN"
sed -e "s/@VERSION@/$version/" -e "s/@ARCH@/$arch/" -e "s/@GLIBC@/${glibc:-2.28}/" \
    -e "s/@SIZE@/$size/" packaging/debian/control.in > "$root/DEBIAN/control"
printf '/etc/rocmforged/config.toml\n' > "$root/DEBIAN/conffiles"
for script in postinst prerm postrm; do
    install -m 0755 "packaging/debian/$script" "$root/DEBIAN/$script"
done
(cd "$root" && find usr etc -type f -exec md5sum {} + | sort -k 2) > "$root/DEBIAN/md5sums"
chmod 0644 "$root/DEBIAN/control" "$root/DEBIAN/conffiles" "$root/DEBIAN/md5sums"

package=$out/rocmforged_${version}_$arch.deb
dpkg-deb --root-owner-group "-Z${COMPRESSION:-xz}" --build "$root" "$package" > /dev/null
echo "$package"
