"""One module a revision, ``<generation>.<step>``: a step only adds, so that older workers of its generation go on."""
