# A package, so that Opacus, which installs a package of this name, does not hide it.
